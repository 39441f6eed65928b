"""The base's linear maps on CUDA: y = x W^T + b, by W as it is kept, full or in float8.

In float8 (`quantised.Fp8Matrix`) the device multiplies float8 by float8, so x is quantised too,
with one scale a token that is measured as the token comes (`norm.py`):

    y_in = s_x_i s_w_n sum_k x8_ik W8_nk + b_n

The library applies the scales itself for many tokens. For few it is up to twice as fast without
them, since it may then cut the sum in parts, and `product.py` says who applies them.

Adapters never see this: they read x as it was before, and add to y in its own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from replica.engine.cuda.norm import Rows
from replica.engine.cuda.product import Product
from replica.engine.quantised import Fp8Matrix, Matrix

_FEW: Final = 512


@dataclass(frozen=True, slots=True)
class Linear:
    W: Tensor  # [out, in], or its transpose where it is in float8
    scales: Tensor | None  # [1, out] float32, where it is in float8
    bias: Tensor | None  # [out]
    one: Tensor | None = None  # float32 1, where it is in float8

    @classmethod
    def of(cls, W: Matrix, bias: Tensor | None) -> Linear:
        if isinstance(W, Fp8Matrix):
            scales = W.scales.t().contiguous()
            return cls(W.values.t(), scales, bias, torch.ones_like(scales[0, 0]))
        assert isinstance(W, Tensor), "packed for CPUs"
        return cls(W, None, bias)

    @property
    def quantised(self) -> bool:
        """Whether it reads `Rows.x8`."""
        return self.scales is not None

    def __call__(self, rows: Rows) -> Product:
        """[tokens, in] -> [tokens, out]."""
        x, x8, scale = rows
        if self.scales is None:
            return Product(linear(x, self.W, self.bias))
        later = x.shape[0] <= _FEW and x.dtype == torch.bfloat16  # float16 would overflow
        one = self.one
        by_row, by_column = (one, one) if later else (scale, self.scales)
        y = torch._scaled_mm(x8, self.W, by_row, by_column, out_dtype=x.dtype, use_fast_accum=True)
        product = Product(y, scale, self.scales) if later else Product(y)
        return product if self.bias is None else Product(product.settle().add_(self.bias))
