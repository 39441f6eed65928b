"""The engine on CUDA: the same forward pass as `engine.model`, made of fused kernels and replayed
from graphs. Imported only where there is a device (or Triton's interpreter, in tests)."""
