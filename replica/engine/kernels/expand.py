"""Expand in Triton, gathered by segment:  y[i, cols_s] += v[i, ranks_s] Bt_s, for each slice s.

    v [tokens, R_max] float32, y [tokens, sum of out]; slices of y and of v lie side by side

One program takes a chunk, one slice and BN of its columns; it returns at once where the adapter
does nothing in that slice, and for a chunk of slot -1, whose y stays as it was.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replica.engine.kernels.shrink import BM
from replica.engine.model_config import Group

_BR = 16
_BN = 128


@triton.jit
def _expand(  # type: ignore[no-untyped-def]
    v, y, table, chunk_row, chunk_len, chunk_slot, out0, out1, out2, v_row, y_row, table_slot,
    BM: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(chunk_slot + chunk)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * table_slot
    rank = tl.load(entry + 1 + part)
    width = tl.where(part == 0, out0, tl.where(part == 1, out1, out2))
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    if (rank == 0) | (tl.program_id(2) * BN >= width):
        return
    first_rank = tl.where(part > 0, tl.load(entry + 1), 0) + tl.where(
        part > 1, tl.load(entry + 2), 0
    )
    first_column = tl.where(part > 0, out0, 0) + tl.where(part > 1, out1, 0)
    Bt = tl.load(entry + 4 + part).to(tl.pointer_type(y.dtype.element_ty))
    m = tl.arange(0, BM)
    live = m < tl.load(chunk_len + chunk)
    rows = (tl.load(chunk_row + chunk) + m).to(tl.int64)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for r0 in range(0, rank, BR):
        r = r0 + tl.arange(0, BR)
        vs = tl.load(
            v + rows[:, None] * v_row + first_rank + r[None, :],
            mask=live[:, None] & (r < rank)[None, :],
            other=0.0,
        )
        Bs = tl.load(
            Bt + r[:, None] * width + n[None, :],
            mask=(r < rank)[:, None] & (n < width)[None, :],
            other=0.0,
        )
        acc = tl.dot(vs.to(Bs.dtype), Bs, acc, input_precision="ieee")
    place = y + rows[:, None] * y_row + first_column + n[None, :]
    mask = live[:, None] & (n < width)[None, :]
    old = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (old + acc).to(y.dtype.element_ty), mask=mask)


def expand(
    v: Tensor, y: Tensor, table: Tensor, chunks: tuple[Tensor, Tensor, Tensor], group: Group
) -> None:
    """`table` is the arena's for one layer and group; chunks are rows, lengths and slots."""
    row, length, slot = chunks
    widths = (*group.out_features, 0, 0)[:3]
    slices = len(group.out_features)
    grid = (row.shape[0], slices, triton.cdiv(max(widths), _BN))
    _expand[grid](
        v, y, table, row, length, slot, *widths, v.stride(0), y.stride(0), table.stride(0),
        BM=BM, BR=_BR, BN=_BN,
    )  # fmt: skip
