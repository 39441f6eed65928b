"""Folding one adapter into the base: what `--merged` serves, at no cost a token.

    W' = W + scaling B A        so that   x W'ᵀ = x Wᵀ + scaling (x Aᵀ) Bᵀ

The sum is made in float32 and cast to the engine's type once, so in float32 the two sides differ by
rounding alone. In bfloat16 they differ by more: W' keeps 8 bits, and what of the adapter is smaller
than W's last bit is lost, while beside the base it is kept. `adapter eval` measures such a loss.
"""

from __future__ import annotations

from torch import Tensor

from replica.engine.host_adapter import LoraPart
from replica.engine.model_config import Group


def fold(W: Tensor, part: LoraPart, group: Group) -> None:
    """Add the adapter's share of one group to W [sum of out, in], float32, in place.

    The scaling is in Bt already.
    """
    at = 0
    for Bt, (start, end) in zip(part.Bt, group.columns, strict=True):
        rank = Bt.shape[0]
        if rank:
            A = part.A[at : at + rank].to(W)
            W[start:end].addmm_(Bt.to(W).t(), A)
            at += rank
