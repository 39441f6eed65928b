"""The operators' web page, `/console`: plain files, served as they are. No build step.

`vendor/` holds Preact with htm (3.1.1) and uPlot (1.6.32) as their authors publish them, each with
its licence.
"""
