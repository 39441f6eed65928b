"""GatheredMeta: which rows use which adapter, as the kernels read it; once a step, for all layers.

From `slots` [rows], the adapter slot of each row (-1: none), three launches on the device build

    order    [rows]      row numbers, sorted by slot; rows without adapter are last
    singles  [rows, 4]   one record a row with an adapter
    chunks   [rows, 4]   one record for at most `block` rows of one slot
    single_tiles, chunk_tiles [rows * tiles, 4]   the same, for each 16-wide tile of its ranks

A record is (position in `order`, rows, slot, tile). What lies behind the last record of a list has
0 rows, which is how a program learns that there is nothing for it. Lists have room for any mix of
adapters and nothing is read back, so an update and all its readers fit in one CUDA graph, which
then serves any mix; equal slots need not be neighbours.

Each row finds its place by comparing its slot with every other's: O(rows²) comparisons, but no
program waits for another. 256 rows are three launches of 8 programs.
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
    slots, ranks, earlier, same, widths, rows, slot_ranks, modules, TILES: tl.constexpr,
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
    tl.store(widths + i, tl.minimum((rank + 15) // 16, TILES), mask=live)


@triton.jit
def _record(at, position, length, slot, tile, mask):  # type: ignore[no-untyped-def]
    tl.store(at, position, mask=mask)
    tl.store(at + 1, length, mask=mask)
    tl.store(at + 2, slot, mask=mask)
    tl.store(at + 3, tile, mask=mask)


@triton.jit(do_not_specialize=["rows", "block"])
def _fill_lists(  # type: ignore[no-untyped-def]
    slots, earlier, same, widths, order, records, tiles, rows, block, ORDER: tl.constexpr,
    TILES: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Every row's place in the lists of chunks of `block`: a sum over the rows before it."""
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    live = i < rows
    none = 1 << 30
    own = tl.load(slots + i, mask=live, other=-1)
    key = tl.where(own < 0, none, own)
    position = tl.zeros((BI,), tl.int32)
    record = tl.zeros((BI,), tl.int32)
    tile = tl.zeros((BI,), tl.int32)
    all_records = 0
    all_tiles = 0
    for j0 in range(0, rows, BJ):
        j = j0 + tl.arange(0, BJ)
        slot = tl.load(slots + j, mask=j < rows, other=-1)
        other = tl.where(slot < 0, none, slot)[None, :]
        head = tl.load(earlier + j, mask=j < rows, other=1) % block == 0
        head = (head & (slot >= 0)).to(tl.int32)
        width = tl.load(widths + j, mask=j < rows, other=0) * head
        before = (other < key[:, None]) | ((other == key[:, None]) & (j[None, :] < i[:, None]))
        before = (before & (j < rows)[None, :]).to(tl.int32)
        position += tl.sum(before, axis=1)
        record += tl.sum(before * head[None, :], axis=1)
        tile += tl.sum(before * width[None, :], axis=1)
        all_records += tl.sum(head, axis=0)
        all_tiles += tl.sum(width, axis=0)
    within = tl.load(earlier + i, mask=live, other=0)
    length = tl.minimum(tl.load(same + i, mask=live, other=0) - within, block)
    width = tl.load(widths + i, mask=live, other=0)
    head = live & (own >= 0) & (within % block == 0)
    if ORDER:
        tl.store(order + position, i, mask=live)
    _record(records + record * 4, position, length, own, 0, head)
    _record(records + i * 4, 0, 0, 0, 0, live & (i >= all_records))
    for t in tl.static_range(TILES):
        _record(tiles + (tile + t) * 4, position, length, own, t, head & (width > t))
        at = i * TILES + t
        _record(tiles + at * 4, 0, 0, 0, 0, live & (at >= all_tiles))


@dataclass(frozen=True, slots=True)
class GatheredMeta:
    """Static buffers for `rows` rows; an update writes them in place."""

    rows: int
    block: int
    shared: bool  # rows mostly share adapters: a hint for the choice of tilings
    launched: int  # programs for chunks: a step with more takes them in turns
    ranks: Tensor  # the arena's table
    order: Tensor
    singles: Tensor
    single_tiles: Tensor
    chunks: Tensor
    chunk_tiles: Tensor
    runs: Tensor  # [3, rows], scratch

    @classmethod
    def empty(
        cls, rows: int, ranks: Tensor, tiles: int, *, block: int, shared: bool, launched: int
    ) -> GatheredMeta:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=ranks.device)

        return cls(
            rows=rows,
            block=block,
            shared=shared,
            launched=launched,
            ranks=ranks,
            order=zeros(rows),
            singles=zeros(rows, RECORD),
            single_tiles=zeros(rows * tiles, RECORD),
            chunks=zeros(rows, RECORD),
            chunk_tiles=zeros(rows * tiles, RECORD),
            runs=zeros(3, rows),
        )

    @property
    def widest(self) -> int:
        """Tiles of the largest rank there can be."""
        return self.chunk_tiles.shape[0] // self.rows

    def update(self, slots: Tensor) -> None:
        """`slots` int32 [rows] on the device. Launches only: it may be captured."""
        if slots.shape != (self.rows,) or slots.dtype != torch.int32:
            raise ValueError(f"slots are int32 [{self.rows}], not {slots.dtype} {slots.shape}")
        earlier, same, widths = self.runs
        grid = (triton.cdiv(self.rows, _BI),)
        _find_runs[grid](
            slots, self.ranks, earlier, same, widths, self.rows, self.ranks.stride(0),
            self.ranks[0].numel(), TILES=self.widest, BI=_BI, BJ=_BJ,
        )  # fmt: skip
        for block, records, tiles in (
            (1, self.singles, self.single_tiles),
            (self.block, self.chunks, self.chunk_tiles),
        ):
            _fill_lists[grid](
                slots, earlier, same, widths, self.order, records, tiles, self.rows, block,
                ORDER=block == 1, TILES=self.widest, BI=_BI, BJ=_BJ,
            )  # fmt: skip
