"""The base's linear maps on CUDA: y = x W^T + b, by W as it is kept, full or in float8.

In float8 (`quantised.Fp8Matrix`) the device multiplies float8 by float8, so x is quantised too,
with one scale a token that is measured as the token comes (`norm.py`):

    y_in = s_x_i s_w_n sum_k x8_ik W8_nk + b_n

Adapters never see this: they read x as it was before, and add to y in its own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from replica.engine.cuda.norm import Rows
from replica.engine.quantised import Fp8Matrix, Matrix


@dataclass(frozen=True, slots=True)
class Linear:
    W: Tensor  # [out, in], or its transpose where it is in float8
    scales: Tensor | None  # [1, out] float32, where it is in float8
    bias: Tensor | None  # [out]

    @classmethod
    def of(cls, W: Matrix, bias: Tensor | None) -> Linear:
        if isinstance(W, Fp8Matrix):
            return cls(W.values.t(), W.scales.t().contiguous(), bias)
        return cls(W, None, bias)

    @property
    def quantised(self) -> bool:
        """Whether it reads `Rows.x8`."""
        return self.scales is not None

    def __call__(self, rows: Rows) -> Tensor:
        """[tokens, in] -> [tokens, out]."""
        if self.scales is None:
            return linear(rows.x, self.W, self.bias)
        y = torch._scaled_mm(
            rows.x8, self.W, rows.scale, self.scales, out_dtype=rows.x.dtype, use_fast_accum=True
        )
        return y if self.bias is None else y.add_(self.bias)
