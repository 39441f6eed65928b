"""A base of Llama-3.1-8B's shapes and adapters for it, of random numbers made where they are used.

Speed depends on shapes, not on values; but the values are those of a trained model's scale, so that
logits are finite and attention is neither flat nor one token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.quantised import Fp8Matrix, Matrix, Quantization
from replica.engine.rope import Llama3Scaling
from replica.engine.sections import A_SIDE, in_order, packed_elements
from replica.engine.weights import BaseWeights, LayerWeights
from shared.ids import AdapterId

_BLOCK_ROWS = 8192


def llama(layers: int = 32, vocab: int = 128_256) -> ModelConfig:
    """Llama 3.1 8B, perhaps of fewer layers."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131_072,
        tie_word_embeddings=False,
        eos_token_ids=frozenset({128_001}),
    )


def small() -> ModelConfig:
    """Of a size for CPUs, with head dimensions that kernels take as they are."""
    return ModelConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        rope_scaling=None,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_ids=frozenset(),
    )


def random_base(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = Quantization.NONE,
    seed: int = 0,
) -> BaseWeights:
    dice = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> Tensor:
        W = torch.empty(rows, columns, dtype=dtype, device=device)
        for start in range(0, rows, _BLOCK_ROWS):
            W[start : start + _BLOCK_ROWS].normal_(std=scale, generator=dice)
        return W

    def matrix(rows: int, columns: int) -> Matrix:
        W = normal(rows, columns, 1 / math.sqrt(columns))
        return Fp8Matrix.of(W.float()) if quantization is Quantization.FP8 else W

    ones = torch.ones(config.hidden_size, dtype=dtype, device=device)
    layers = tuple(
        LayerWeights(
            input_norm=ones,
            post_norm=ones,
            groups=tuple(
                matrix(sum(group.out_features), group.in_features) for group in config.groups
            ),
            biases=(None,) * len(config.groups),
            qk_norm=None,
        )
        for _ in range(config.num_layers)
    )
    embed = normal(config.vocab_size, config.hidden_size, 1.0)
    head = normal(config.vocab_size, config.hidden_size, 2 / math.sqrt(config.hidden_size))
    return BaseWeights(config, embed, layers, ones, head)


def random_adapter(
    name: str, config: ModelConfig, rank: int, *, dtype: torch.dtype, seed: int, pinned: bool
) -> HostAdapter:
    """On all modules of all layers, all of one rank: A of deviation 1 / sqrt(in), B of 0.02 times a
    scaling of 2."""
    slices = sum(len(group.modules) for group in config.groups)
    ranks = ((rank,) * slices,) * config.num_layers
    flat = torch.zeros(packed_elements(ranks, config), dtype=dtype, pin_memory=pinned)
    dice = torch.Generator().manual_seed(seed)
    noise = torch.empty(1 << 20).normal_(generator=dice).to(dtype)
    for section in in_order(ranks, config):
        size = section.rows * section.columns
        scale = 1 / math.sqrt(section.columns) if section.side == A_SIDE else 0.04
        at = int(torch.randint(max(1, len(noise) - size), (1,), generator=dice))
        drawn = noise[at : at + size] if size <= len(noise) - at else noise.repeat(2)[:size]
        flat[section.host : section.host + size] = drawn * scale
    return HostAdapter(AdapterId(name), f"{name}-{seed}", rank, flat, ranks)
