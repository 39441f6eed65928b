"""HostAdapter: one validated adapter in host memory, packed the way it will lie in pages.

One flat tensor holds its sections one after another (`sections.py` says which and in what order),
so that entering the pool is a few copies of long runs. Folding the scaling into B happens here,
once, in float32, and spares every kernel a multiplication:  y_i += (x A_iᵀ) Bt_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from replica.engine.model_config import ModelConfig
from replica.engine.sections import A_SIDE, TILE, Ranks, in_order, packed_elements
from shared.ids import AdapterId

Pair = tuple[Tensor, Tensor, float]
"""A [r, in], B [out, r] as PEFT stores them, and the scaling."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    adapter: AdapterId
    digest: str
    rank: int  # the largest of its modules
    flat: Tensor
    ranks: Ranks

    @property
    def size_bytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


def pack(
    adapter: AdapterId,
    digest: str,
    config: ModelConfig,
    pairs: Mapping[tuple[int, str], Pair],
    dtype: torch.dtype,
    *,
    pinned: bool = False,
) -> HostAdapter:
    """`pairs` by layer and module; their shapes were checked against `config`. `pinned` memory is
    what a GPU can copy from while it computes."""
    modules = _modules(config)
    ranks = ranks_of(config, {place: pair[0].shape[0] for place, pair in pairs.items()})
    flat = torch.zeros(packed_elements(ranks, config), dtype=dtype, pin_memory=pinned)
    for section in in_order(ranks, config):
        A, B, scaling = pairs[section.layer, modules[section.slice]]
        first = TILE * section.tile
        last = first + section.rows
        size = section.rows * section.columns
        place = flat[section.host : section.host + size].view(section.rows, section.columns)
        place.copy_(A[first:last] if section.side == A_SIDE else _scaled(B, first, last, scaling))
    return HostAdapter(adapter, digest, max(map(max, ranks)), flat, ranks)


def ranks_of(config: ModelConfig, ranks: Mapping[tuple[int, str], int]) -> Ranks:
    """By layer and slice, from ranks by layer and module."""
    modules = _modules(config)
    return tuple(
        tuple(ranks.get((layer, module), 0) for module in modules)
        for layer in range(config.num_layers)
    )


def packed_bytes(config: ModelConfig, ranks: Mapping[tuple[int, str], int], item_bytes: int) -> int:
    """What `pack` will take, from the modules' ranks alone."""
    return packed_elements(ranks_of(config, ranks), config) * item_bytes


def _scaled(B: Tensor, first: int, last: int, scaling: float) -> Tensor:
    return (B[:, first:last].float() * scaling).t()


def _modules(config: ModelConfig) -> tuple[str, ...]:
    return tuple(module for group in config.groups for module in group.modules)
