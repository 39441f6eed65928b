"""A base's linear weights in eight bits: float8_e4m3fn with one scale an output channel.

    W[o, i] ~ scale[o] q[o, i],      scale[o] = max_i |W[o, i]| / 448

448 is the largest e4m3 number, so no channel saturates; a weight is off by at most 1/16 of itself
(three bits of mantissa) or, near zero, by 2^-10 scale[o]. Embedding, head, norms and biases keep
their type, and so does x: adapters see what they would see beside the full base.

`PRODUCTS` has a device's own way to y = x Wᵀ. A device without one computes up: each block of
channels is widened to x's type, used and dropped, so that no whole matrix is ever held wide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import linear

from replica.engine.packed import PackedMatrix

E4M3_MAX: Final = 448.0

_BLOCK_ELEMENTS: Final = 1 << 20
"""Weights that are wide at a time: 4 MiB in float32, which a core's cache still holds."""


class Quantization(StrEnum):
    """How a replica keeps the linear weights of its base."""

    NONE = "none"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [out, 1]

    @classmethod
    def of(cls, W: Tensor) -> Fp8Matrix:
        """From W [out, in] in float32."""
        largest = W.abs().amax(dim=1, keepdim=True)
        scales = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
        return cls((W / scales).to(torch.float8_e4m3fn), scales)

    @property
    def size_bytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()

    def widened(self, dtype: torch.dtype, start: int = 0, end: int | None = None) -> Tensor:
        """Rows [start, end) as plain numbers; the scale is applied in float32."""
        wide = self.values[start:end].float().mul_(self.scales[start:end])
        return wide.to(dtype)


Matrix: TypeAlias = Tensor | Fp8Matrix | PackedMatrix
"""Weights [out, in] of one linear map."""

Product = Callable[[Tensor, Fp8Matrix, Tensor | None], Tensor]
"""x [tokens, in], W, bias [out] or None -> x Wᵀ + bias [tokens, out], in x's type."""

PRODUCTS: Final[dict[str, Product]] = {}
"""By device type, where a device has FP8 arithmetic of its own."""


def product(x: Tensor, W: Matrix, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias."""
    if isinstance(W, PackedMatrix):
        return W.product(x, bias)
    if isinstance(W, Fp8Matrix):
        return PRODUCTS.get(x.device.type, computed_up)(x, W, bias)
    return linear(x, W, bias)


def computed_up(x: Tensor, W: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """The definition of a `Product`, and the way of devices that have no other."""
    rows, columns = W.values.shape
    y = x.new_empty(x.shape[0], rows)
    block = max(1, _BLOCK_ELEMENTS // columns)
    for start in range(0, rows, block):
        end = min(start + block, rows)
        part = None if bias is None else bias[start:end]
        y[:, start:end] = linear(x, W.widened(x.dtype, start, end), part)
    return y
