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
from replica.engine.kernels import expand as expanding
from replica.engine.kernels import shrink as shrinking
from replica.engine.kernels import tiling
from replica.engine.kernels.metadata import GatheredMeta
from replica.engine.kernels.tiling import Tiling
from replica.engine.model_config import Group
from replica.engine.sections import TILE

PREFILL_BLOCK: Final = 64
DECODE_BLOCK: Final = 16
SHARED: Final = 4
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
        """Buffers for steps of `rows` rows. `shared`: say so where an adapter has four or more."""
        block = DECODE_BLOCK if tiling.row_class(rows) else PREFILL_BLOCK
        meta = GatheredMeta.empty(rows, self._ranks, self._tiles, block=block, shared=shared)
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
        if cut.form == "rows":
            self._shrink_rows(x, scratch, module, group, meta, cut)
        else:
            self._shrink_tiles(x, scratch, v, module, group, meta, cut)
        self._expand(y, scratch, v, module, group, meta, cut)

    def _reserve(self, index: int, meta: GatheredMeta, cut: Tiling) -> tuple[Tensor, Tensor]:
        """Planes and the reduced v; there before anything is captured."""
        group = self._groups[index]
        size = len(group.modules) * meta.rows * self._tiles * TILE
        planes = self._take("planes", -(-group.in_features // cut.BK) * size, torch.float32)
        if not cut.reduce:
            return planes, planes
        self._take("locks", size // TILE, torch.int32)
        return planes, self._take("v", size, self._pool.dtype)

    def _shrink_rows(
        self, x: Tensor, planes: Tensor, module: int, group: Group, meta: GatheredMeta, cut: Tiling
    ) -> None:
        K, slices, tiles = group.in_features, len(group.modules), self._tiles
        records = meta.singles if tiles == 1 else meta.single_tiles
        launched = min(records.shape[0], _share(meta.rows, tiles))
        grid = (launched * slices * -(-K // cut.BK),)
        shrinking.shrink_rows[grid](
            x, self._pool, planes, self._sections, self._ranks, meta.order, records, module,
            meta.rows, launched, records.shape[0], x.stride(0), self._sections.stride(0),
            self._ranks.stride(0), K=K, SLICES=slices, TILES=tiles, TR=cut.TR, BK=cut.BK,
            LOOP=launched < records.shape[0], **self._options(cut, cut.shrink_warps),
        )  # fmt: skip

    def _shrink_tiles(
        self, x: Tensor, planes: Tensor, v: Tensor, module: int, group: Group, meta: GatheredMeta,
        cut: Tiling,
    ) -> None:  # fmt: skip
        K, slices, tiles = group.in_features, len(group.modules), self._tiles
        by_tile = tiles > 1 and cut.TR == TILE
        records = meta.chunk_tiles if by_tile else meta.chunks
        chunks = _chunks(meta)
        launched = min(records.shape[0], _share(chunks, tiles) if by_tile else chunks)
        blocks = 1 if by_tile else -(-tiles * TILE // cut.TR)
        locks = self._scratch["locks"] if cut.reduce else meta.order  # unused
        grid = (launched * slices * blocks * -(-K // cut.BK),)
        shrinking.shrink_tiles[grid](
            x, self._pool, planes, v, locks, self._sections, self._ranks, meta.order, records,
            module, meta.rows, launched, records.shape[0], x.stride(0), self._sections.stride(0),
            self._ranks.stride(0), K=K, SLICES=slices, TILES=tiles, TR=cut.TR, BM=meta.block,
            BK=cut.BK, BKI=cut.BKI, BLOCKS=blocks, STAGES=cut.stages, REDUCE=cut.reduce,
            **self._options(cut, cut.shrink_warps),
        )  # fmt: skip

    def _expand(
        self, y: Tensor, planes: Tensor, v: Tensor, module: int, group: Group, meta: GatheredMeta,
        cut: Tiling,
    ) -> None:  # fmt: skip
        widths = (*group.out_features, 0, 0)[:3]
        wide = cut.BN * (cut.COLUMNS if cut.form == "columns" else 1)
        parts = -(-group.in_features // cut.BK)
        shape: dict[str, Any] = dict(
            N0=widths[0], N1=widths[1], N2=widths[2], SLICES=len(group.modules), TILES=self._tiles,
            RB=cut.RB, BN=cut.BN, PLANES=parts, PADDED=triton.next_power_of_2(parts),
            EVEN=all(width % max(wide, TILE) == 0 for width in widths),
            **self._options(cut, cut.expand_warps),
        )  # fmt: skip
        column_tiles = sum(-(-width // wide) for width in widths)
        tables = (self._sections, self._ranks, meta.order)
        strides = (y.stride(0), self._sections.stride(0), self._ranks.stride(0))
        if cut.form == "rows":
            expanding.expand_rows[(meta.rows * column_tiles,)](
                y, self._pool, planes, *tables, meta.singles, module, meta.rows, *strides, **shape
            )
            return
        launched = _chunks(meta)
        shape |= dict(BM=meta.block, REDUCED=cut.reduce)
        if cut.form == "columns":
            shape |= dict(COLUMNS=cut.COLUMNS, STAGES=cut.stages)
        kernel = expanding.expand_columns if cut.form == "columns" else expanding.expand_tiles
        kernel[(launched * column_tiles,)](
            y, self._pool, planes, v, *tables, meta.chunks, module, meta.rows, launched, *strides,
            **shape,
        )  # fmt: skip

    def _options(self, cut: Tiling, warps: int) -> dict[str, Any]:
        pdl = cut.pdl and self._pdl
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


def _share(records: int, tiles: int) -> int:
    """Programs for rank tiles: twice the chunks. Most adapters of a mix have a tile or two; those
    of a step with more are taken in turns."""
    return records * min(tiles, 2)


def _chunks(meta: GatheredMeta) -> int:
    """Programs for chunks: enough for a step whose rows share adapters, or half of whose do not;
    others are taken in turns."""
    if meta.rows <= meta.block:
        return meta.rows
    return max(meta.block, -(-meta.rows // meta.block) + meta.rows // (4 if meta.shared else 2))


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
