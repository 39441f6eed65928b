"""The gathered product in plain torch: the definition, the CPU's backend, and the kernels' oracle.

For each segment [s, e) whose slot holds A [R, in] and, for each slice i, Bt_i [r_i, out_i]:

    v[s:e]         = x[s:e] A^T             shrink
    y[s:e, cols_i] += v[s:e, ranks_i] Bt_i  expand

The matrices are views into the pool, cut where a page ends. A segment without adapter is not in the
plan, so no index of it exists and its rows cannot change.

A decoding step makes thousands of such products of a few rows. They run on the calling thread
alone: to wake the others takes longer than to do their share.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from replica.core.segments import Segments
from replica.core.step import BASE_SLOT
from replica.engine.arena import Arena, LayerParts, LoraPart
from replica.engine.model_config import Group

_FEW_ROWS: Final = 64


def shrink(x: Tensor, part: LoraPart) -> Tensor:
    """v [n, R] of one segment's x [n, in]."""
    if len(part.A) == 1:
        return x @ part.A[0].t()
    return torch.cat([x @ A.t() for A in part.A], dim=1)


def expand(v: Tensor, y: Tensor, part: LoraPart) -> None:
    """Add to one segment's y [n, sum of out], in place."""
    for rank, start, end, Bt in part.Bt:
        y[:, start:end].addmm_(v[:, rank : rank + Bt.shape[0]], Bt)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The segments of a step that have an adapter: (start, end) in tokens, and its weights."""

    segments: tuple[tuple[int, int, tuple[LayerParts, ...]], ...]

    @classmethod
    def of(cls, segments: Segments, arena: Arena) -> ReferencePlan:
        spans = zip(segments.starts, segments.starts[1:], segments.slots, strict=False)
        return cls(
            tuple(
                (start, end, arena.parts(slot)) for start, end, slot in spans if slot != BASE_SLOT
            )
        )

    def add(self, x: Tensor, y: Tensor, layer: int, index: int, group: Group) -> None:
        """y += the adapters' product with x, for every segment that has one."""
        with _threads(1 if x.shape[0] <= _FEW_ROWS else torch.get_num_threads()):
            for start, end, adapter in self.segments:
                part = adapter[layer][index]
                if part is not None:
                    expand(shrink(x[start:end], part), y[start:end], part)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
