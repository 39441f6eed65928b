"""The base's linear maps: y = x W^T + b, in the dtype of the engine or quantised to float8.

Quantised (row-wise, dynamic): W8 = round(W / s_w) with one s_w an output column, s_w = max|W_n| / 448,
and x likewise with one s_x a token, measured as the token comes;

    y_in = s_x_i s_w_n sum_k x8_ik W8_nk + b_n

Adapters never see this: they read x as it was before, and add to y in its own dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from replica.engine.cuda.norm import FLOAT8_MAX, Rows


class Linear(Protocol):
    @property
    def quantised(self) -> bool:
        """Whether it reads `Rows.x8`."""

    def __call__(self, rows: Rows) -> Tensor:
        """[tokens, in] -> [tokens, out]."""


@dataclass(frozen=True, slots=True)
class Dense:
    W: Tensor  # [out, in]
    bias: Tensor | None

    quantised = False

    def __call__(self, rows: Rows) -> Tensor:
        return linear(rows.x, self.W, self.bias)


@dataclass(frozen=True, slots=True)
class Float8:
    W8: Tensor  # [out, in] float8_e4m3fn
    scale: Tensor  # [1, out] float32
    bias: Tensor | None

    quantised = True

    @classmethod
    def of(cls, W: Tensor, bias: Tensor | None) -> Float8:
        scale = (W.abs().amax(dim=1, keepdim=True).float() / FLOAT8_MAX).clamp_(min=1e-12)
        W8 = (W.float() / scale).to(torch.float8_e4m3fn)
        return cls(W8, scale.t().contiguous(), bias)

    def __call__(self, rows: Rows) -> Tensor:
        assert rows.x8 is not None and rows.scale is not None, "this map reads float8 rows"
        y = torch._scaled_mm(
            rows.x8, self.W8.t(), rows.scale, self.scale, out_dtype=rows.x.dtype, use_fast_accum=True
        )
        return y if self.bias is None else y.add_(self.bias)
