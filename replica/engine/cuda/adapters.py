"""Adapters: a step's gathered product, for the fused model and its graphs.

What a graph reads is laid out in buffers that stay, one set a number of rows; laying out is
launched with the step, so it is captured too. Steps that are not captured bring their own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from replica.core.step import BASE_SLOT, Row
from replica.engine.arena import Arena
from replica.engine.kernels.gathered import SHARED, GatheredLora
from replica.engine.kernels.metadata import GatheredMeta
from replica.engine.model_config import Group


class Mix(Enum):
    """How the rows of a step go with adapters; other kernels are the fastest for each."""

    NONE = "no row has one"
    DISTINCT = "most rows have one of their own"
    SHARED = "several rows to an adapter"

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Mix:
        slots = [row.slot for row in rows if row.slot != BASE_SLOT]
        if not slots:
            return cls.NONE
        tokens = sum(len(row.tokens) for row in rows if row.slot != BASE_SLOT)
        return cls.SHARED if tokens >= SHARED * len(set(slots)) else cls.DISTINCT


@dataclass(frozen=True, slots=True)
class Plan:
    lora: GatheredLora
    meta: GatheredMeta

    def add(self, x: Tensor, y: Tensor, layer: int, index: int, group: Group) -> None:
        self.lora.add(x, y, layer, index, self.meta)


class Adapters:
    def __init__(self, arena: Arena, max_rank: int) -> None:
        self._lora = GatheredLora(arena, arena.config.groups, max_rank)
        self._kept: dict[tuple[int, Mix], GatheredMeta] = {}

    def plan(self, slots: Tensor, mix: Mix, *, kept: bool) -> Plan | None:
        """`slots` int32 [rows] on the device. `kept` where the buffers must stay what they are."""
        if mix is Mix.NONE:
            return None
        rows = slots.shape[0]
        meta = self._kept.get((rows, mix)) if kept else None
        if meta is None:
            meta = self._lora.meta(rows, shared=mix is Mix.SHARED)
        if kept:
            self._kept[rows, mix] = meta
        meta.update(slots)
        return Plan(self._lora, meta)
