"""The likeliest token of each row, and whether the row can be drawn from at all:

    token_i = argmin { t : z_it = max z_i }, or -1 where not all of z_i is finite

in two passes: each row is cut in PARTS, then the parts are compared in order, so ties go to the
lowest id.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS: Final = 16
_BLOCK: Final = 2048


@triton.jit
def _peaks(z, values, ids, width, share, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    begin = part * share
    end = tl.minimum(begin + share, width)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    where = tl.zeros((BLOCK,), dtype=tl.int32)
    broken = tl.zeros((BLOCK,), dtype=tl.int32)
    for at in range(begin, end, BLOCK):
        t = at + tl.arange(0, BLOCK)
        x = tl.load(z + row * width + t, mask=t < end, other=-1e38).to(tl.float32)
        broken |= (tl.abs(x) <= 3.4028234e38).to(tl.int32) ^ 1  # NaN compares false
        better = x > best
        where = tl.where(better, t, where)
        best = tl.where(better, x, best)
    peak = tl.max(best, axis=0)
    lowest = tl.min(tl.where(best == peak, where, width), axis=0)
    bad = tl.max(broken, axis=0)
    tl.store(values + row * PARTS + part, peak)
    tl.store(ids + row * PARTS + part, tl.where(bad > 0, -1, lowest))


@triton.jit
def _lowest(values, ids, tokens, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * PARTS + part)
    token = tl.load(ids + row * PARTS + part)
    peak = tl.max(value, axis=0)
    lowest = tl.min(tl.where(value == peak, token, 2147483647), axis=0)
    tl.store(tokens + row, tl.where(tl.min(token, axis=0) < 0, -1, lowest))


def greedy(logits: Tensor, tokens: Tensor) -> None:
    """logits [rows, vocab] contiguous; tokens [rows] int32 are written."""
    rows, width = logits.shape
    values = torch.empty(rows, _PARTS, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, _PARTS, dtype=torch.int32, device=logits.device)
    share = triton.cdiv(triton.cdiv(width, _PARTS), _BLOCK) * _BLOCK
    _peaks[(rows, _PARTS)](logits, values, ids, width, share, PARTS=_PARTS, BLOCK=_BLOCK)
    _lowest[(rows,)](values, ids, tokens, PARTS=_PARTS, num_warps=1)
