"""What a device has: fused kernels and graphs on CUDA, plain torch elsewhere; and the host memory
that it copies from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from replica.engine.flight import StepRunner
from replica.engine.host_adapter import HostAdapter
from replica.engine.quantised import Quantization
from replica.engine.runner import Runner
from replica.engine.weights import load_base, torch_dtype
from shared.ids import AdapterId

Read = Callable[[AdapterId], HostAdapter]
"""By an adapter's folder; may block, and raises BadAdapter."""


def runner_on(
    device: str,
    *,
    base_dir: Path,
    dtype: str,
    slots: int,
    max_rank: int,
    pages: int,
    page_tokens: int,
    max_running: int,
    max_step_tokens: int,
    max_model_len: int,
    threads: int,
    merged: HostAdapter | None = None,
    quantization: Quantization = Quantization.NONE,
) -> StepRunner:
    """Reads the base: raises BadBase. Triton is imported only where it runs."""
    if not device.startswith("cuda"):
        return Runner(
            base_dir=base_dir,
            device=device,
            dtype=dtype,
            slots=slots,
            max_rank=max_rank,
            pages=pages,
            page_tokens=page_tokens,
            threads=threads,
            merged=merged,
            quantization=quantization,
        )
    from replica.engine.cuda.runner import CudaRunner

    return CudaRunner(
        weights=load_base(
            base_dir, torch_dtype(dtype), device, merged=merged, quantization=quantization
        ),
        slots=slots,
        max_rank=max_rank,
        pages=pages,
        page_tokens=page_tokens,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
    )


def read_for(device: str, read: Read) -> Read:
    """`read`, whose adapters then lie where the device copies from while nobody waits for it."""
    if not device.startswith("cuda"):
        return read

    def pinned(folder: AdapterId) -> HostAdapter:
        host = read(folder)
        return replace(host, flat=host.flat.pin_memory())

    return pinned
