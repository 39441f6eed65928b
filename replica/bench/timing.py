"""Times of GPU work, and what this GPU can do at most.

Work is captured into one CUDA graph of `calls` calls and the graph is replayed: launch gaps of
Python are not in the numbers. A time is the median replay divided by the calls.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl

_REPLAYS: Final = 7


@triton.jit
def _copy(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def _nothing(pointer):  # type: ignore[no-untyped-def]
    pass


def microseconds(call: Callable[[int], None], calls: int, replays: int = _REPLAYS) -> float:
    """Of one `call(i)`, i = 0 .. calls - 1."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(0)  # compiles, and reserves what it needs, before the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                call(i)
        for _ in range(2):
            graph.replay()
        times = []
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(replays)
        ]
        for begin, end in events:
            begin.record(stream)
            graph.replay()
            end.record(stream)
        stream.synchronize()
        times = [begin.elapsed_time(end) * 1e3 / calls for begin, end in events]
    return statistics.median(times)


def ceilings() -> dict[str, float | str]:
    """Copy and read bandwidth, the bf16 matrix rate on random data, an empty launch in a graph."""
    a = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16)
    b = torch.empty_like(a)
    copy = microseconds(lambda _: _copy[(a.numel() // 8192,)](a, b, BLOCK=8192, num_warps=8), 4)
    rows, sums = a.view(1 << 14, -1), torch.empty(1 << 14, device="cuda")
    read = microseconds(lambda _: torch.sum(rows, 1, dtype=torch.float32, out=sums), 4)
    n = 8192
    x, w = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    multiply = microseconds(lambda _: torch.mm(x, w), 4)
    empty = microseconds(lambda _: _nothing[(132,)](sums), 200)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_s": 4 * a.numel() / copy / 1e3,
        "read_gb_s": 2 * a.numel() / read / 1e3,
        "bf16_tflop_s": 2 * n**3 / multiply / 1e6,
        "empty_launch_us": empty,
    }
