"""The gated activation:  y = silu(gate) * up,  where gate and up are the halves of one row.

    gate_up [tokens, 2 inner] -> y [tokens, inner]

silu(gate) is rounded to the dtype before it is multiplied, as `engine.model` does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.engine.cuda.product import Product

_BLOCK = 1024


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    gate_up, by_row, by_column, y, inner, SCALED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < inner
    g = tl.load(gate_up + row * 2 * inner + columns, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * inner + inner + columns, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(by_row + row)
        g *= scale * tl.load(by_column + columns, mask=mask, other=0.0)
        u *= scale * tl.load(by_column + inner + columns, mask=mask, other=0.0)
    s = (g / (1 + tl.exp(-g))).to(y.dtype.element_ty)
    out = s.to(tl.float32) * u
    tl.store(y + row * inner + columns, out.to(y.dtype.element_ty), mask=mask)


def gated(product: Product) -> Tensor:
    gate_up = product.raw
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, inner, dtype=gate_up.dtype, device=gate_up.device)
    _gated[(tokens, triton.cdiv(inner, _BLOCK))](
        gate_up, *product.scales, y, inner, SCALED=product.scaled, BLOCK=_BLOCK
    )
    return y
