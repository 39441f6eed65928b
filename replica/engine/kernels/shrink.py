"""Shrink in Triton, gathered by segment:  v[i] = x[i] A_slot(i)^T.

    x [tokens, in], v [tokens, R_max] float32; only the first R columns of a row are written, where
    R is the sum of its adapter's own ranks in this group

One program takes a chunk (rows of one slot, at most BM) and BR of its ranks. Programs beyond the
adapter's own rank return at once, and so does a chunk of slot -1, whose v stays as it was. Weights
are found through the arena's table, so adapters of different ranks lie anywhere, unpadded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BM = 16
_BR = 16
_BK = 128


@triton.jit
def _shrink(  # type: ignore[no-untyped-def]
    x, v, table, chunk_row, chunk_len, chunk_slot, K, x_row, v_row, table_slot,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    slot = tl.load(chunk_slot + chunk)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * table_slot
    rank = tl.load(entry + 1) + tl.load(entry + 2) + tl.load(entry + 3)
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    if tl.program_id(1) * BR >= rank:
        return
    A = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    m = tl.arange(0, BM)
    live = m < tl.load(chunk_len + chunk)
    rows = (tl.load(chunk_row + chunk) + m).to(tl.int64)
    acc = tl.zeros((BM, BR), dtype=tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        xs = tl.load(
            x + rows[:, None] * x_row + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0
        )
        As = tl.load(
            A + r[None, :] * K + k[:, None], mask=(r < rank)[None, :] & (k < K)[:, None], other=0.0
        )
        acc = tl.dot(xs, As, acc, input_precision="ieee")
    tl.store(v + rows[:, None] * v_row + r[None, :], acc, mask=live[:, None] & (r < rank)[None, :])


def shrink(
    x: Tensor, v: Tensor, table: Tensor, chunks: tuple[Tensor, Tensor, Tensor], rank_max: int
) -> None:
    """`table` is the arena's for one layer and group; chunks are rows, lengths and slots."""
    row, length, slot = chunks
    grid = (row.shape[0], triton.cdiv(rank_max, _BR))
    _shrink[grid](
        x, v, table, row, length, slot, x.shape[1], x.stride(0), v.stride(0), table.stride(0),
        BM=BM, BR=_BR, BK=_BK,
    )  # fmt: skip
