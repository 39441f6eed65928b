"""GatheredLora: y += the adapters' product, in two launches a group of a layer, on a GPU.

    lora = GatheredLora(arena, config.groups, max_rank)   once
    meta = lora.meta(rows)                                 once a CUDA graph, or a step
    meta.update(slots)                                     once a step
    lora.add(x, y, layer, index, meta)                     each group of each layer, after y = x Wᵀ

The launches' shapes depend on `rows` alone, so all of it may be captured. Law: a row's result
depends on its own x and adapter, the module and the form of the kernels chosen for it, to the bit.
Belongs to one stream: planes are scratch that the next `add` writes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol

import torch
import triton
from torch import Tensor

from replica.core.segments import Segments
from replica.core.step import BASE_SLOT
from replica.engine.arena import Arena
from replica.engine.kernels import tiling
from replica.engine.kernels.expand import expand_chunks, expand_rows
from replica.engine.kernels.metadata import GatheredMeta
from replica.engine.kernels.shrink import shrink_chunks, shrink_rows
from replica.engine.kernels.tiling import Shrink, Tiling
from replica.engine.model_config import Group
from replica.engine.sections import TILE

DECODE_BLOCK: Final = 16
SHARED: Final = 8
"""Rows an adapter, on average, from which a step's rows share adapters."""


class Tables(Protocol):
    """What kernels read adapters through; the arena has it."""

    pool: Tensor  # [pages, elements]
    sections: Tensor  # int64 [slots, layers, modules, 2, tiles]
    ranks: Tensor  # int32 [slots, layers, modules]


class GatheredLora:
    def __init__(self, tables: Tables, groups: Sequence[Group], max_rank: int) -> None:
        self._pool = tables.pool.view(-1)
        self._sections, self._ranks = tables.sections, tables.ranks
        self._groups = tuple(groups)
        self._max_rank = max_rank
        self._tiles = tables.sections.shape[-1]
        self._modules = tables.ranks.shape[2]
        device = tables.pool.device
        self._device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        firsts = [0]
        for group in self._groups:
            firsts.append(firsts[-1] + len(group.modules))
        self._firsts = tuple(firsts)
        self._scratch: dict[str, Tensor] = {}
        self._kept: list[Tensor] = []

    def meta(self, rows: int, *, shared: bool = False) -> GatheredMeta:
        """Buffers for steps of `rows` rows. `shared` says that adapters have SHARED rows or more
        and chooses kernels for it; any mix is served rightly either way."""
        block = DECODE_BLOCK if tiling.row_class(rows) else 32 if self._tiles < 4 else 64
        launched = _programs(rows, block, shared)
        meta = GatheredMeta.empty(
            rows, self._ranks, self._tiles, block=block, shared=shared, launched=launched
        )
        for index in range(len(self._groups)):
            self._reserve(index, meta, self.tiling(index, meta))
        return meta

    def tiling(self, index: int, meta: GatheredMeta) -> Tiling:
        return tiling.choose(
            self._device, self._groups[index], self._tiles, self._max_rank, meta.rows, meta.shared
        )

    def add(
        self, x: Tensor, y: Tensor, layer: int, index: int, meta: GatheredMeta,
        cut: Tiling | None = None,
    ) -> None:  # fmt: skip
        """x [rows, in], y [rows, sum of out] of the group's modules; y changes in place."""
        group = self._groups[index]
        cut = cut or self.tiling(index, meta)
        scratch, v = self._reserve(index, meta, cut)
        module = layer * self._modules + self._firsts[index]
        self._shrink(x, scratch, v, module, group, meta, cut.shrink)
        self._expand(y, scratch, v, module, group, meta, cut)

    def _reserve(self, index: int, meta: GatheredMeta, cut: Tiling) -> tuple[Tensor, Tensor]:
        """Planes and the reduced v; there before anything is captured."""
        group = self._groups[index]
        size = len(group.modules) * meta.rows * self._tiles * TILE
        planes = self._take("planes", -(-group.in_features // cut.shrink.BK) * size, torch.float32)
        if not cut.shrink.reduce:
            return planes, planes
        self._take("locks", size // TILE, torch.int32)
        return planes, self._take("v", size, self._pool.dtype)

    def _shrink(
        self, x: Tensor, planes: Tensor, v: Tensor, module: int, group: Group, meta: GatheredMeta,
        cut: Shrink,
    ) -> None:  # fmt: skip
        slices, tiles = len(group.modules), self._tiles
        by_tile = tiles > 1 and cut.TR <= TILE
        if cut.rows:
            records, programs = meta.single_tiles if by_tile else meta.singles, meta.rows
        else:
            records, programs = meta.chunk_tiles if by_tile else meta.chunks, meta.launched
        last = records.shape[0]
        launched = min(last, _tile_programs(programs, tiles) if by_tile else programs)
        blocks = 1 if by_tile else -(-tiles * TILE // max(cut.TR, TILE))
        grid = (launched * slices * blocks * -(-group.in_features // cut.BK),)
        tables = (self._sections, self._ranks, meta.order, records, module, meta.rows)
        strides = (x.stride(0), self._sections.stride(0), self._ranks.stride(0))
        shape: dict[str, Any] = dict(
            K=group.in_features, SLICES=slices, TILES=tiles, TR=cut.TR, BK=cut.BK,
            LOOP=launched < last, **self._options(cut.pdl, cut.warps),
        )  # fmt: skip
        if cut.rows:
            shrink_rows[grid](x, self._pool, planes, *tables, launched, last, *strides, **shape)
            return
        locks = self._scratch["locks"] if cut.reduce else meta.order  # unused
        shrink_chunks[grid](
            x, self._pool, planes, v, locks, *tables, launched, last, *strides, BM=_tall(meta),
            BKI=cut.BKI, BLOCKS=blocks, STAGES=cut.stages, REDUCE=cut.reduce, **shape,
        )  # fmt: skip

    def _expand(
        self, y: Tensor, planes: Tensor, v: Tensor, module: int, group: Group, meta: GatheredMeta,
        cut: Tiling,
    ) -> None:  # fmt: skip
        widths, side = (*group.out_features, 0, 0)[:3], cut.expand
        parts = -(-group.in_features // cut.shrink.BK)
        columns = sum(-(-width // side.WIDE) for width in widths)
        records = meta.singles if side.rows else meta.chunks
        tables = (self._sections, self._ranks, meta.order, records, module, meta.rows)
        strides = (y.stride(0), self._sections.stride(0), self._ranks.stride(0))
        shape: dict[str, Any] = dict(
            N0=widths[0], N1=widths[1], N2=widths[2], SLICES=len(group.modules), TILES=self._tiles,
            WIDE=side.WIDE, PLANES=parts, PADDED=triton.next_power_of_2(parts),
            EVEN=all(width % max(side.WIDE, TILE) == 0 for width in widths),
            **self._options(side.pdl, side.warps),
        )  # fmt: skip
        if side.rows:
            grid = (meta.rows * columns,)
            expand_rows[grid](y, self._pool, planes, *tables, *strides, RB=side.RB, **shape)
            return
        expand_chunks[(meta.launched * columns,)](
            y, self._pool, planes, v, *tables, meta.launched, *strides, BM=_tall(meta),
            RB=triton.next_power_of_2(self._tiles * TILE), BN=side.BN, STAGES=side.stages,
            REDUCED=cut.shrink.reduce, LOOP=meta.launched < meta.rows, **shape,
        )  # fmt: skip

    def _options(self, pdl: bool, warps: int) -> dict[str, Any]:
        pdl = pdl and self._pdl
        return {"PDL": pdl, "num_warps": warps} | ({"launch_pdl": True} if pdl else {})

    def _take(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Scratch of at least `size`, all zero at first, which locks are between launches too.
        What grew is kept: a captured graph may write to it."""
        held = self._scratch.get(name)
        if held is None or held.numel() < size:
            held = torch.zeros(size, dtype=dtype, device=self._pool.device)
            self._scratch[name] = held
            self._kept.append(held)
        return held


def _programs(rows: int, block: int, shared: bool) -> int:
    """For chunks: enough for 64 adapters, fewer where rows share adapters. A step with more chunks
    takes them in turns; programs without a chunk still cost a launch."""
    return min(rows, -(-rows // block) + (max(4, rows // 16) if shared else 64))


def _tall(meta: GatheredMeta) -> int:
    """Rows of a tile."""
    return max(meta.block, TILE)


def _tile_programs(programs: int, tiles: int) -> int:
    """For rank tiles: all of a small step's, else twice the chunks. Most adapters of a mix have a
    tile or two; those of a step with more are taken in turns."""
    return max(min(programs * tiles, 64), programs * min(tiles, 2))


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """One step of any shape, launched as it comes."""

    lora: GatheredLora
    metadata: GatheredMeta

    @classmethod
    def of(cls, segments: Segments, arena: Arena) -> TritonPlan:
        """An empty slot is an error, never the base's answer."""
        used = set(segments.slots) - {BASE_SLOT}
        for slot in used:
            arena.rank(slot)
        lengths = [end - start for start, end in pairwise(segments.starts)]
        slots = torch.tensor(segments.slots, dtype=torch.int32).repeat_interleave(
            torch.tensor(lengths)
        )
        lora = GatheredLora(arena, arena.config.groups, arena.max_rank)
        meta = lora.meta(slots.shape[0], shared=slots.shape[0] >= SHARED * len(used))
        meta.update(slots.to(arena.device))
        return cls(lora, meta)

    def add(self, x: Tensor, y: Tensor, layer: int, index: int, group: Group) -> None:
        self.lora.add(x, y, layer, index, self.metadata)
