"""Shrink in Triton, gathered by segment:  v[i, slice] = x[i] A_slot(i),slice^T.

    x [tokens, in], v [tokens, slices, ranks] float32; only the first r columns of a slice are
    written, where r is its own rank

One program takes a chunk (rows of one slot, at most BM) and one rank tile of one slice: one section
of the pool. Programs beyond the slice's own rank return at once, and so does a chunk of slot -1,
whose v stays as it was.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replica.engine.sections import TILE

BM = 16
_BK = 128


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x, v, pool, sections, ranks, chunk_row, chunk_len, chunk_slot, K, x_row, v_row, v_slice,
    sections_slot, sections_slice, ranks_slot,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    tile = tl.program_id(1)
    part = tl.program_id(2)
    slot = tl.load(chunk_slot + chunk).to(tl.int64)
    if slot < 0:
        return
    left = tl.load(ranks + slot * ranks_slot + part) - tile * BR
    if left <= 0:
        return
    A = pool + tl.load(sections + slot * sections_slot + part * sections_slice + tile)
    m = tl.arange(0, BM)
    r = tl.arange(0, BR)
    live = m < tl.load(chunk_len + chunk)
    rows = (tl.load(chunk_row + chunk) + m).to(tl.int64)
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        xs = tl.load(
            x + rows[:, None] * x_row + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0
        )
        As = tl.load(
            A + r[None, :] * K + k[:, None], mask=(r < left)[None, :] & (k < K)[:, None], other=0.0
        )
        acc = tl.dot(xs, As, acc, input_precision="ieee")
    place = v + rows[:, None] * v_row + part * v_slice + tile * BR + r[None, :]
    tl.store(place, acc, mask=live[:, None] & (r < left)[None, :])


def shrink(
    x: Tensor,
    v: Tensor,
    pool: Tensor,
    tables: tuple[Tensor, Tensor],
    chunks: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Tables are the arena's sections and ranks, for one layer and group; chunks are rows, lengths
    and slots."""
    sections, ranks = tables
    row, length, slot = chunks
    grid = (row.shape[0], triton.cdiv(v.shape[2], TILE), v.shape[1])
    _shrink[grid](
        x, v, pool, sections, ranks, row, length, slot, x.shape[1], x.stride(0), *v.stride()[:2],
        *sections.stride()[:2], ranks.stride(0), BM=BM, BR=TILE, BK=_BK,
    )  # fmt: skip
