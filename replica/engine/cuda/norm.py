"""Add and RMS-normalise in one pass over the residual stream.

    h <- h + delta;   y = weight * h / sqrt(mean(h^2) + eps)       h, delta, y [tokens, width]

The sum is rounded to the stream's dtype before it is normalised, and the normalised value before
it is weighted, as `engine.model` does. Where the next linear map is quantised, the same pass also
gives y in float8 with one scale a token: y ~ scale * y8, scale = max|y| / 448.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.engine.cuda.product import Product
from replica.engine.quantised import E4M3_MAX


class Rows(NamedTuple):
    """The input of a linear map: as it is, and where the map is quantised in float8 too."""

    x: Tensor  # [tokens, width]
    x8: Tensor | None = None  # [tokens, width] float8_e4m3fn
    scale: Tensor | None = None  # [tokens, 1] float32

    @classmethod
    def empty(cls, tokens: int, width: int, like: Tensor, *, quantised: bool) -> Rows:
        x = torch.empty(tokens, width, dtype=like.dtype, device=like.device)
        if not quantised:
            return cls(x)
        x8 = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=like.device)
        return cls(x, x8, torch.empty(tokens, 1, dtype=torch.float32, device=like.device))


@triton.jit
def to_float8(y, row, x8, scale, columns, mask, width, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store one row in float8; y is what it holds, in float32."""
    s = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-12) / LARGEST
    tl.store(scale + row, s)
    tl.store(x8 + row * width + columns, (y / s).to(x8.dtype.element_ty), mask=mask)


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    h, delta, by_row, by_column, weight, y, y8, scale, width, eps,
    ADD: tl.constexpr, SCALED: tl.constexpr, QUANTISED: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(h + row * width + columns, mask=mask, other=0.0)
    if ADD:
        d = tl.load(delta + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        if SCALED:
            d *= tl.load(by_row + row) * tl.load(by_column + columns, mask=mask, other=0.0)
            d = d.to(h.dtype.element_ty).to(tl.float32)
        x = (x.to(tl.float32) + d).to(h.dtype.element_ty)
        tl.store(h + row * width + columns, x, mask=mask)
    x = x.to(tl.float32)
    x = x / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    out = (x.to(y.dtype.element_ty).to(tl.float32) * w).to(y.dtype.element_ty)
    tl.store(y + row * width + columns, out, mask=mask)
    if QUANTISED:
        to_float8(out.to(tl.float32), row, y8, scale, columns, mask, width, LARGEST)


def add_norm(
    h: Tensor, delta: Product | None, weight: Tensor, eps: float, *, quantised: bool = False
) -> Rows:
    """h [tokens, width] contiguous, changed in place; delta None adds nothing."""
    tokens, width = h.shape
    out = Rows.empty(tokens, width, h, quantised=quantised)
    adds, delta = delta is not None, delta or Product(h)
    block = triton.next_power_of_2(width)
    _add_norm[(tokens,)](
        h, delta.raw, *delta.scales, weight, out.x,
        out.x if out.x8 is None else out.x8, out.x if out.scale is None else out.scale,
        width, eps,
        ADD=adds, SCALED=delta.scaled, QUANTISED=quantised, LARGEST=E4M3_MAX, BLOCK=block,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def _quantise(  # type: ignore[no-untyped-def]
    x, x8, scale, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    y = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    to_float8(y, row, x8, scale, columns, mask, width, LARGEST)


def quantise(x: Tensor) -> Rows:
    """x [tokens, width] contiguous, with its float8 beside it."""
    tokens, width = x.shape
    x8 = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantise[(tokens,)](
        x, x8, scale, width, LARGEST=E4M3_MAX, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return Rows(x, x8, scale)
