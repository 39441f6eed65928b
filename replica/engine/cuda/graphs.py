"""Graphs: a pass captured once for each padded number of rows or tokens, replayed for any mix.

A graph holds addresses and launches, no lengths and no adapters: what differs between steps lies in
buffers that it reads. Families of graphs differ in launches: steps without adapters have none of
theirs. All share one pool of scratch memory, for one runs at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import torch

from replica.engine.cuda.adapters import Mix

Pass = Callable[[int, Mix], None]
"""Launch the whole pass of such a size on the current stream."""


class Graphs:
    def __init__(self, sizes: Iterable[int], run: Pass) -> None:
        self.sizes = sorted(sizes)
        self._run = run
        self._graphs: dict[tuple[int, Mix], torch.cuda.CUDAGraph] = {}

    def capture(self, mixes: Sequence[Mix], pool: tuple[int, int]) -> None:
        """Large ones first: smaller ones then fit in memory they have left. Nothing is captured
        where this is not called, and every pass launched as it comes."""
        for mix in mixes:
            for size in reversed(self.sizes):
                self._run(size, mix)  # compiles, and chooses algorithms, outside the graph
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._run(size, mix)
                self._graphs[size, mix] = graph

    def size_for(self, wanted: int) -> int | None:
        """The least size that holds so many."""
        at = bisect_left(self.sizes, wanted)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, size: int, mix: Mix) -> None:
        graph = self._graphs.get((size, mix))
        if graph is None:
            self._run(size, mix)
        else:
            graph.replay()
