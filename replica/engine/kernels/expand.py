"""Expand in Triton, gathered by segment:  y[i, cols_s] += v[i, s] Bt_s, for each slice s.

    v [tokens, slices, ranks] float32, y [tokens, sum of out]; the slices' columns lie side by side

One program takes a chunk, one slice and BN of its columns; it returns at once where the adapter
does nothing in that slice, and for a chunk of slot -1, whose y stays as it was.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replica.engine.kernels.shrink import BM
from replica.engine.model_config import Group
from replica.engine.sections import TILE

_BN = 128


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    v, y, pool, sections, ranks, chunk_row, chunk_len, chunk_slot, out0, out1, out2,
    v_row, v_slice, y_row, sections_slot, sections_slice, sections_side, ranks_slot,
    BM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(chunk_slot + chunk).to(tl.int64)
    if slot < 0:
        return
    rank = tl.load(ranks + slot * ranks_slot + part)
    width = tl.where(part == 0, out0, tl.where(part == 1, out1, out2))
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    if (rank == 0) | (tl.program_id(2) * BN >= width):
        return
    starts = sections + slot * sections_slot + part * sections_slice + sections_side
    first_column = tl.where(part > 0, out0, 0) + tl.where(part > 1, out1, 0)
    m = tl.arange(0, BM)
    live = m < tl.load(chunk_len + chunk)
    rows = (tl.load(chunk_row + chunk) + m).to(tl.int64)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for r0 in range(0, rank, BR):
        r = tl.arange(0, BR)
        vs = tl.load(
            v + rows[:, None] * v_row + part * v_slice + r0 + r[None, :],
            mask=live[:, None] & (r0 + r < rank)[None, :],
            other=0.0,
        )
        Bs = tl.load(
            pool + tl.load(starts + r0 // BR) + r[:, None] * width + n[None, :],
            mask=(r0 + r < rank)[:, None] & (n < width)[None, :],
            other=0.0,
        )
        acc = tl.dot(vs.to(Bs.dtype), Bs, acc, input_precision="ieee")
    place = y + rows[:, None] * y_row + first_column + n[None, :]
    mask = live[:, None] & (n < width)[None, :]
    old = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (old + acc).to(y.dtype.element_ty), mask=mask)


def expand(
    v: Tensor,
    y: Tensor,
    pool: Tensor,
    tables: tuple[Tensor, Tensor],
    chunks: tuple[Tensor, Tensor, Tensor],
    group: Group,
) -> None:
    """Tables are the arena's sections and ranks, for one layer and group; chunks are rows, lengths
    and slots."""
    sections, ranks = tables
    row, length, slot = chunks
    widths = (*group.out_features, 0, 0)[:3]
    grid = (row.shape[0], v.shape[1], triton.cdiv(max(widths), _BN))
    _expand[grid](
        v, y, pool, sections, ranks, row, length, slot, *widths, *v.stride()[:2], y.stride(0),
        *sections.stride()[:3], ranks.stride(0), BM=BM, BR=TILE, BN=_BN,
    )  # fmt: skip
