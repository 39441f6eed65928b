"""TritonPlan: the gathered product as one shrink and one expand launch a group of a layer.

Segments are cut into chunks of at most BM rows, each with its slot; the chunks are made once a step
and serve every layer. Segments without adapter give no chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from replica.core.segments import Segments
from replica.core.step import BASE_SLOT
from replica.engine.arena import Arena
from replica.engine.kernels.expand import expand
from replica.engine.kernels.shrink import BM, shrink
from replica.engine.model_config import Group
from replica.engine.sections import first_slice


@dataclass(frozen=True, slots=True)
class TritonPlan:
    chunks: tuple[Tensor, Tensor, Tensor]  # first row, rows, slot; int32
    arena: Arena
    rank_max: int  # of the adapters in this step

    @classmethod
    def of(cls, segments: Segments, arena: Arena) -> TritonPlan:
        spans = zip(segments.starts, segments.starts[1:], segments.slots, strict=False)
        chunks = [
            (row, min(BM, end - row), slot)
            for start, end, slot in spans
            if slot != BASE_SLOT
            for row in range(start, end, BM)
        ]
        columns = torch.tensor(chunks, dtype=torch.int32).t().contiguous().to(arena.device)
        ranks = [arena.rank(slot) for slot in {slot for _, _, slot in chunks}]
        return cls((columns[0], columns[1], columns[2]), arena, max(ranks))

    def add(self, x: Tensor, y: Tensor, layer: int, index: int, group: Group) -> None:
        first, slices = first_slice(self.arena.config, index), len(group.modules)
        v = torch.empty(x.shape[0], slices, self.rank_max, dtype=torch.float32, device=x.device)
        of_group = slice(first, first + slices)
        tables = self.arena.sections[:, layer, of_group], self.arena.ranks[:, layer, of_group]
        shrink(x, v, self.arena.pool, tables, self.chunks)
        expand(v, y, self.arena.pool, tables, self.chunks, group)
