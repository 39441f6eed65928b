"""Adapters of mixed ranks in a small arena, and what they add to a row by definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replica.core.step import BASE_SLOT
from replica.engine.arena import Arena
from replica.engine.host_adapter import HostAdapter, Pair, pack
from replica.engine.model_config import ModelConfig
from shared.ids import AdapterId

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    eos_token_ids=frozenset(),
)


@dataclass
class Resident:
    """What is in a slot, as PEFT has it."""

    pairs: dict[tuple[int, str], Pair]
    host: HostAdapter


def resident(seed: int, ranks: Sequence[int], dtype: torch.dtype) -> Resident:
    """An adapter with `ranks[i]` in module i of each layer; 0 leaves it out."""
    dice = torch.Generator().manual_seed(seed)
    pairs: dict[tuple[int, str], Pair] = {}
    for layer in range(CONFIG.num_layers):
        at = 0
        for group in CONFIG.groups:
            for module, out in zip(group.modules, group.out_features, strict=True):
                if rank := ranks[at]:
                    shrinks = torch.randn(rank, group.in_features, generator=dice) / 7
                    expands = torch.randn(out, rank, generator=dice) / 4
                    pairs[layer, module] = (shrinks, expands, 0.5 + seed)
                at += 1
    return Resident(pairs, pack(AdapterId(f"a{seed}"), "", CONFIG, pairs, dtype))


def arena_of(
    residents: Sequence[Resident | None], dtype: torch.dtype, device: str, max_rank: int = 64
) -> Arena:
    arena = Arena(
        config=CONFIG,
        pages=64,
        page_tokens=16,
        slots=len(residents),
        max_rank=max_rank,
        dtype=dtype,
        device=torch.device(device),
    )
    scattered = [page * 37 % 64 for page in range(64)]
    for slot, each in enumerate(residents):
        if each is not None:
            pages = [scattered.pop() for _ in range(arena.pages_of(each.host))]
            arena.place(slot, each.host, pages)
    return arena


def by_definition(
    x: Tensor, y: Tensor, layer: int, index: int, slots: Sequence[int], residents: list[Resident]
) -> Tensor:
    """y_i + s (x_i A^T) B^T in float64; `slots` is one a row."""
    y, group = y.double(), CONFIG.groups[index]
    for row, slot in enumerate(slots):
        for module, (first, last) in zip(group.modules, group.columns, strict=True):
            if slot != BASE_SLOT and (layer, module) in residents[slot].pairs:
                shrinks, expands, scaling = residents[slot].pairs[layer, module]
                v = shrinks.double() @ x[row].double()
                y[row, first:last] += scaling * (expands.double() @ v)
    return y
