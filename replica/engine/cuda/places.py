"""Places: where the tokens of a step belong, as the kernels read it.

A running sequence has a seat: a row of `tables`, where the pages of its tokens stand in order. So a
step names a seat a token and uploads only pages that are new.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    tables: Tensor  # int32 [seats, pages a sequence may have]
    seats: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]; -1 is padding: it has no key, and attends to nothing
