"""LoraLinear: a group's linear map with the adapters of a mixed batch beside it.

    y_i = x_i W^T + b + x_i A_a(i)^T Bt_a(i)     and  y_i = x_i W^T + b  for a row without adapter

b is the base's own, where its family has one. The base's product is one matrix multiplication for
all rows, by W as it is kept, full or quantised. The adapters' term reads the same x either way; it
is added by the gathered product of `kernels`, for segments of rows that share a slot. A step
without adapters has no plan and pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from replica.engine.kernels import GatheredPlan
from replica.engine.model_config import Group
from replica.engine.quantised import Matrix, product


@dataclass(frozen=True, slots=True)
class LoraLinear:
    W: Matrix  # [sum of out, in]
    bias: Tensor | None  # [sum of out]
    group: Group
    layer: int
    index: int  # of the group in its layer

    def __call__(self, x: Tensor, adapters: GatheredPlan | None) -> Tensor:
        """x [tokens, in] -> y [tokens, sum of out]."""
        y = product(x, self.W, self.bias)
        if adapters is not None:
            adapters.add(x, y, self.layer, self.index, self.group)
        return y
