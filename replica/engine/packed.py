"""A matrix in the order that the CPU's matrix product reads it: oneDNN's own blocked layout.

    x Wᵀ + b, with W [out, in] reordered once, when the base is loaded

A decoding step multiplies a few rows by every weight of the base. MKL's product, which torch takes
for plain matrices, reorders W each time, and with so few rows that is a large part of the work.
One pass over all matrices of SmolLM2-135M took these CPU ms on one core (AMD EPYC, AVX2):

    rows        1     8    32
    plain    37.4  83.7   161
    packed   35.8  60.1   143

and at 300 rows, as prefill has, packed ones took 7 % more over a layer's four. Only float32 is
packed: other types were not measured. The operators are torch's own and not documented (its
compiler emits them), so `available` tries them; without them matrices stay plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

_ROWS_HINT: Final = 32
"""oneDNN chooses the layout for a number of rows; this one's is right for 2 to 300 of them."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    packed: Tensor  # opaque
    shape: tuple[int, int]  # out, in

    @classmethod
    def of(cls, W: Tensor) -> PackedMatrix:
        """From W [out, in]: float32, on a CPU where packing is `available`."""
        packed = torch.ops.mkldnn._reorder_linear_weight(W, _ROWS_HINT)
        return cls(packed, (W.shape[0], W.shape[1]))

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [tokens, in] -> x Wᵀ + bias [tokens, out]."""
        if not x.shape[0]:
            return x.new_empty(0, self.shape[0])
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return y


@cache
def available() -> bool:
    """Whether this torch packs on this CPU, and then multiplies rightly."""
    if not torch.backends.mkldnn.is_available():
        return False
    x, W = torch.ones(3, 32), torch.arange(64.0).view(2, 32)
    try:
        return torch.allclose(PackedMatrix.of(W).product(x, None), linear(x, W))
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
