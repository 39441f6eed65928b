"""Graphs: the decode pass captured once for each padded number of rows, replayed for any mix.

A graph holds addresses and launches, no lengths and no adapters: what differs between steps lies in
buffers that it reads. Families of graphs differ in launches: steps without adapters have none of
theirs. All share one pool of scratch memory, for one runs at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from replica.engine.cuda.adapters import Mix

Pass = Callable[[int, Mix], None]
"""Launch the whole pass for so many rows on the current stream."""


class Graphs:
    def __init__(self, sizes: Sequence[int], run: Pass) -> None:
        self.sizes = sorted(sizes)
        self._run = run
        self._graphs: dict[tuple[int, Mix], torch.cuda.CUDAGraph] = {}

    def capture(self, mixes: Sequence[Mix]) -> None:
        """Large ones first: smaller ones then fit in memory they have left."""
        pool = torch.cuda.graph_pool_handle()
        for mix in mixes:
            for rows in reversed(self.sizes):
                self._run(rows, mix)  # compiles, and chooses algorithms, outside the graph
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                    self._run(rows, mix)
                self._graphs[rows, mix] = graph

    def size_for(self, rows: int) -> int | None:
        """The least captured number that holds so many rows."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def replay(self, rows: int, mix: Mix) -> None:
        self._graphs[rows, mix].replay()
