"""The gathered product's backends, and the one place that chooses between them.

Triton on CUDA, plain torch elsewhere. Triton is imported only where it runs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from replica.core.segments import Segments
from replica.engine.arena import Arena
from replica.engine.kernels.reference import ReferencePlan
from replica.engine.model_config import Group


class GatheredPlan(Protocol):
    """A step's segments, laid out for one backend; shared by all layers."""

    def add(self, x: Tensor, y: Tensor, layer: int, index: int, group: Group) -> None:
        """y [tokens, sum of out] += the adapters' product with x [tokens, in], in place."""


def plan(segments: Segments, arena: Arena) -> GatheredPlan | None:
    """None when no row has an adapter."""
    if segments.base_only:
        return None
    if arena.device.type == "cuda":
        from replica.engine.kernels.gathered import TritonPlan

        return TritonPlan.of(segments, arena)
    return ReferencePlan.of(segments, arena)
