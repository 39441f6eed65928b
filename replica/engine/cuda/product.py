"""Product: what a linear map gave, perhaps still to be scaled.

    y_ij = raw_ij by_row_i by_column_j

A product of float8 numbers is fastest without its scales (the library then may split the sum), so
they are left to whoever reads it next and has it in registers anyway. `settle` applies them where
somebody has to add to y first.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


class Product(NamedTuple):
    raw: Tensor  # [tokens, out] contiguous
    by_row: Tensor | None = None  # float32 [tokens, 1]; both or none
    by_column: Tensor | None = None  # float32 [1, out]

    @property
    def scaled(self) -> bool:
        """Whether there is something left to apply."""
        return self.by_row is not None

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """For a kernel's arguments; any tensor where it reads none."""
        if self.by_row is None or self.by_column is None:
            return self.raw, self.raw
        return self.by_row, self.by_column

    def settle(self) -> Tensor:
        """y, in the place of raw."""
        if self.scaled:
            tokens, width = self.raw.shape
            grid = (tokens, triton.cdiv(width, _BLOCK))
            _apply[grid](self.raw, *self.scales, width, BLOCK=_BLOCK)
        return self.raw


@triton.jit
def _apply(y, by_row, by_column, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(y + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    x *= tl.load(by_row + row) * tl.load(by_column + columns, mask=mask, other=0.0)
    tl.store(y + row * width + columns, x.to(y.dtype.element_ty), mask=mask)
