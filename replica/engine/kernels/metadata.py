"""GatheredMeta: which rows use which adapter, as the kernels read it; once a step, for all layers.

From `slots` [rows], the adapter slot of each row (-1: none), two launches on the device build

    order    [rows]           row numbers, sorted by slot; rows without adapter are last
    singles  [rows, 4]        one record a row with an adapter
    chunks   [rows, 4]        one record for at most `block` rows of one slot
    single_tiles, chunk_tiles [rows * tiles, 4]   the same, one record a 16-wide tile of its rank

A record is (position in `order`, rows, slot, tile). What lies behind the last record of a list has
0 rows, which is how a program learns that there is nothing for it. Lists have room for any mix of
adapters and nothing is read back, so an update and all its readers fit in one CUDA graph, which
then serves any mix; equal slots need not be neighbours.

Each row finds its place by comparing its slot with every other's: O(rows²) comparisons, but no
program waits for another. 256 rows are two launches of 8 programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

RECORD: Final = 4
_BI = 32
_BJ = 128


@triton.jit(do_not_specialize=["rows", "modules", "slot_ranks"])
def _find_runs(  # type: ignore[no-untyped-def]
    slots, ranks, earlier, same, tiles, rows, slot_ranks, modules, TILES: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """How many rows share a row's slot, how many of them are before it, and its adapter's tiles."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    own = tl.load(slots + i, mask=i < rows, other=-1)
    before = tl.zeros((BI,), tl.int32)
    count = tl.zeros((BI,), tl.int32)
    for j0 in range(0, rows, BJ):
        j = j0 + tl.arange(0, BJ)
        equal = (tl.load(slots + j, mask=j < rows, other=-2)[None, :] == own[:, None]).to(tl.int32)
        count += tl.sum(equal, axis=1)
        before += tl.sum(equal * (j[None, :] < i[:, None]).to(tl.int32), axis=1)
    rank = tl.zeros((BI,), tl.int32)
    table = ranks + tl.maximum(own, 0).to(tl.int64) * slot_ranks
    for m0 in range(0, modules, BJ):
        m = m0 + tl.arange(0, BJ)
        mask = (own >= 0)[:, None] & (m < modules)[None, :]
        rank = tl.maximum(
            rank, tl.max(tl.load(table[:, None] + m[None, :], mask=mask, other=0), axis=1)
        )
    live = i < rows
    tl.store(earlier + i, before, mask=live)
    tl.store(same + i, count, mask=live)
    tl.store(tiles + i, tl.minimum((rank + 15) // 16, TILES), mask=live)


@triton.jit
def _record(at, position, length, slot, tile, mask):  # type: ignore[no-untyped-def]
    tl.store(at, position, mask=mask)
    tl.store(at + 1, length, mask=mask)
    tl.store(at + 2, slot, mask=mask)
    tl.store(at + 3, tile, mask=mask)


@triton.jit(do_not_specialize=["rows", "block"])
def _fill_lists(  # type: ignore[no-untyped-def]
    slots, earlier, same, tiles, order, singles, single_tiles, chunks, chunk_tiles, rows, block,
    TILES: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Every row's place in every list, as a sum over the rows that come before it."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    live = i < rows
    none = 1 << 30
    own = tl.load(slots + i, mask=live, other=-1)
    key = tl.where(own < 0, none, own)
    position = tl.zeros((BI,), tl.int32)
    single_tile = tl.zeros((BI,), tl.int32)
    chunk = tl.zeros((BI,), tl.int32)
    chunk_tile = tl.zeros((BI,), tl.int32)
    total = 0
    total_tiles = 0
    total_chunks = 0
    total_chunk_tiles = 0
    for j0 in range(0, rows, BJ):
        j = j0 + tl.arange(0, BJ)
        slot = tl.load(slots + j, mask=j < rows, other=-1)
        other = tl.where(slot < 0, none, slot)[None, :]
        one = (slot >= 0).to(tl.int32)
        tile = tl.load(tiles + j, mask=j < rows, other=0) * one
        head = (tl.load(earlier + j, mask=j < rows, other=1) % block == 0).to(tl.int32) * one
        before = (other < key[:, None]) | ((other == key[:, None]) & (j[None, :] < i[:, None]))
        before = (before & (j < rows)[None, :]).to(tl.int32)
        position += tl.sum(before, axis=1)
        single_tile += tl.sum(before * tile[None, :], axis=1)
        chunk += tl.sum(before * head[None, :], axis=1)
        chunk_tile += tl.sum(before * (head * tile)[None, :], axis=1)
        total += tl.sum(one, axis=0)
        total_tiles += tl.sum(tile, axis=0)
        total_chunks += tl.sum(head, axis=0)
        total_chunk_tiles += tl.sum(head * tile, axis=0)
    within = tl.load(earlier + i, mask=live, other=0)
    count = tl.load(same + i, mask=live, other=0)
    own_tiles = tl.load(tiles + i, mask=live, other=0)
    length = tl.minimum(count - within, block)
    single = live & (own >= 0)
    heads = single & (within % block == 0)
    tl.store(order + position, i, mask=live)
    _record(singles + position * 4, position, 1, own, 0, single)
    _record(chunks + chunk * 4, position, length, own, 0, heads)
    _record(singles + i * 4, 0, 0, 0, 0, live & (i >= total))
    _record(chunks + i * 4, 0, 0, 0, 0, live & (i >= total_chunks))
    for t in tl.static_range(TILES):
        has = own_tiles > t
        _record(single_tiles + (single_tile + t) * 4, position, 1, own, t, single & has)
        _record(chunk_tiles + (chunk_tile + t) * 4, position, length, own, t, heads & has)
        at = i * TILES + t
        _record(single_tiles + at * 4, 0, 0, 0, 0, live & (at >= total_tiles))
        _record(chunk_tiles + at * 4, 0, 0, 0, 0, live & (at >= total_chunk_tiles))


@dataclass(frozen=True, slots=True)
class GatheredMeta:
    """Static buffers for up to `rows` rows; an update writes them in place."""

    rows: int
    block: int
    shared: bool  # rows mostly share adapters: a hint for the choice of kernels, not of results
    ranks: Tensor  # the arena's table
    order: Tensor
    singles: Tensor
    single_tiles: Tensor
    chunks: Tensor
    chunk_tiles: Tensor
    runs: Tensor  # [3, rows]

    @classmethod
    def empty(
        cls, rows: int, ranks: Tensor, tiles: int, *, block: int = 16, shared: bool = False
    ) -> GatheredMeta:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=ranks.device)

        lists = [zeros(rows * n, RECORD) for n in (1, tiles, 1, tiles)]
        return cls(rows, block, shared, ranks, zeros(rows), *lists, zeros(3, rows))

    @property
    def tiles(self) -> int:
        return self.single_tiles.shape[0] // self.rows

    def update(self, slots: Tensor) -> None:
        """`slots` int32 [rows] on the device. Launches only: it may be captured."""
        if slots.shape != (self.rows,) or slots.dtype != torch.int32:
            raise ValueError(f"slots are int32 [{self.rows}], not {slots.dtype} {slots.shape}")
        earlier, same, tiles = self.runs
        grid = (triton.cdiv(self.rows, _BI),)
        modules = self.ranks[0].numel()
        _find_runs[grid](
            slots, self.ranks, earlier, same, tiles, self.rows, self.ranks.stride(0), modules,
            TILES=self.tiles, BI=_BI, BJ=_BJ,
        )  # fmt: skip
        _fill_lists[grid](
            slots, earlier, same, tiles, self.order, self.singles, self.single_tiles, self.chunks,
            self.chunk_tiles, self.rows, self.block, TILES=self.tiles, BI=_BI, BJ=_BJ,
        )  # fmt: skip
