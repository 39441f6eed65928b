"""Benchmarks of the engine's parts on the GPU at hand, as programs; nothing of them is served."""
