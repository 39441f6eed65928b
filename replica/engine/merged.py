"""Folding one adapter into the base: what `--merged` serves, at no cost a token.

    W' = W + scaling B A        so that   x W'ᵀ = x Wᵀ + scaling (x Aᵀ) Bᵀ

The sum is made in float32 and cast to the engine's type once, so in float32 the two sides differ by
rounding alone. In bfloat16 they differ by more: W' keeps 8 bits, and what of the adapter is smaller
than W's last bit is lost, while beside the base it is kept.
"""

from __future__ import annotations

from torch import Tensor

from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.sections import A_SIDE, first_slice, in_order


class Merge:
    """One adapter, ready to be folded matrix by matrix. It is rounded no further than it was
    packed: pack it in float32."""

    def __init__(self, adapter: HostAdapter, config: ModelConfig) -> None:
        self._config = config
        self._tiles: dict[tuple[int, int], tuple[list[Tensor], list[Tensor]]] = {}
        for each in in_order(adapter.ranks, config):
            flat = adapter.flat[each.host : each.host + each.rows * each.columns]
            A, Bt = self._tiles.setdefault((each.layer, each.slice), ([], []))
            side = A if each.side == A_SIDE else Bt
            side.append(flat.view(each.rows, each.columns))

    def fold(self, W: Tensor, layer: int, index: int) -> None:
        """Add the adapter's share of group `index` of a layer to W [sum of out, in], float32."""
        first = first_slice(self._config, index)
        for at, (start, end) in enumerate(self._config.groups[index].columns, first):
            for A, Bt in zip(*self._tiles.get((layer, at), ((), ())), strict=True):
                W[start:end].addmm_(Bt.to(W).t(), A.to(W))
