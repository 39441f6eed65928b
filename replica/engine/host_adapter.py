"""HostAdapter: one validated adapter in host memory, packed the way kernels read it.

One flat tensor holds everything, so that entering a slot is one copy. For each layer and group that
the adapter touches it holds

    A   [R, in]      the slices' A matrices under one another, R = r_1 + r_2 + ...
    Bt  [r_i, out_i] a slice's B, transposed and multiplied by its scaling, one after another

where r_i is the module's own rank: nothing is padded to a cap. Folding the scaling into B happens
once, in float32, and spares every kernel a multiplication:  y_i += (x A_iᵀ) Bt_i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from replica.engine.model_config import Group, ModelConfig
from shared.ids import AdapterId

_ALIGN: Final = 16  # elements: matrices start where wide loads may


@dataclass(frozen=True, slots=True)
class LoraPart:
    """One adapter's share of one group of one layer."""

    A: Tensor  # [R, in]
    Bt: tuple[Tensor, ...]  # one a slice, [r_i, out_i]; r_i == 0 where the module is not adapted

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(Bt.shape[0] for Bt in self.Bt)


LayerParts = tuple[LoraPart | None, ...]
"""One a group, in the order of ModelConfig.groups; None where the adapter does nothing."""

Pair = tuple[Tensor, Tensor, float]
"""A [r, in], B [out, r] as PEFT stores them, and the scaling."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    adapter: AdapterId
    digest: str
    rank: int  # the largest of its modules
    flat: Tensor
    ranks: tuple[tuple[tuple[int, ...], ...], ...]  # [layer][group][slice]

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()

    def parts(self, flat: Tensor, groups: Sequence[Group]) -> tuple[LayerParts, ...]:
        """Views of `flat`, which is this adapter's or a copy of it, one a layer and group."""
        layout = _Layout(flat)
        return tuple(
            tuple(layout.part(group, ranks) for group, ranks in zip(groups, layer, strict=True))
            for layer in self.ranks
        )


def pack(
    adapter: AdapterId,
    digest: str,
    config: ModelConfig,
    pairs: Mapping[tuple[int, str], Pair],
    dtype: torch.dtype,
) -> HostAdapter:
    """`pairs` by layer and module; their shapes were checked against `config`."""
    ranks = tuple(
        tuple(
            tuple(
                pairs[layer, module][0].shape[0] if (layer, module) in pairs else 0
                for module in group.modules
            )
            for group in config.groups
        )
        for layer in range(config.num_layers)
    )
    size = _Layout(None)
    for layer_ranks in ranks:
        for group, group_ranks in zip(config.groups, layer_ranks, strict=True):
            size.part(group, group_ranks)
    flat = torch.zeros(size.at, dtype=dtype)
    largest = max(rank for layer in ranks for group in layer for rank in group)
    host = HostAdapter(adapter, digest, largest, flat, ranks)
    for layer, parts in enumerate(host.parts(flat, config.groups)):
        for group, part in zip(config.groups, parts, strict=True):
            if part is not None:
                _fill(part, [pairs.get((layer, module)) for module in group.modules])
    return host


def packed_bytes(config: ModelConfig, ranks: Mapping[tuple[int, str], int], item_bytes: int) -> int:
    """What `pack` will take, from the modules' ranks alone."""
    layout = _Layout(None)
    for layer in range(config.num_layers):
        for group in config.groups:
            layout.part(group, tuple(ranks.get((layer, module), 0) for module in group.modules))
    return layout.at * item_bytes


def _fill(part: LoraPart, pairs: Sequence[Pair | None]) -> None:
    at = 0
    for Bt, pair in zip(part.Bt, pairs, strict=True):
        if pair is not None:
            A, B, scaling = pair
            part.A[at : at + A.shape[0]] = A
            Bt.copy_((B.float() * scaling).t())
            at += A.shape[0]


class _Layout:
    """Hands out consecutive places; without a tensor it only counts."""

    def __init__(self, flat: Tensor | None) -> None:
        self.at = 0
        self._flat = flat

    def part(self, group: Group, ranks: tuple[int, ...]) -> LoraPart | None:
        if not any(ranks):
            return None
        A = self._take(sum(ranks), group.in_features)
        Bt = tuple(self._take(r, out) for r, out in zip(ranks, group.out_features, strict=True))
        return LoraPart(A, Bt)

    def _take(self, rows: int, columns: int) -> Tensor:
        start, size = self.at, rows * columns
        self.at += -(-size // _ALIGN) * _ALIGN
        if self._flat is None:
            return torch.empty(0)
        return self._flat[start : start + size].view(rows, columns)
