"""The shared base: a Llama decoder over pages, with every linear map open to adapters.

For each layer, with h [tokens, hidden]:

    h += o(attention(rope(qkv(norm(h)))))
    h += down(silu(gate(norm(h))) * up(norm(h)))

Tokens of all rows lie end to end in one dimension; positions, pages and adapters are theirs alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from replica.engine.attention import AttentionPlan
from replica.engine.kernels import GatheredPlan
from replica.engine.lora import LoraLinear
from replica.engine.model_config import ModelConfig
from replica.engine.weights import BaseWeights


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as tensors."""

    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    attention: AttentionPlan
    adapters: GatheredPlan | None  # None: no row of the step has one
    last: Tensor  # [samples] the places whose logits are wanted


class Model:
    def __init__(self, weights: BaseWeights) -> None:
        self._weights = weights
        self._config = config = weights.config
        self._linears = tuple(
            tuple(
                LoraLinear(W, group, layer, index)
                for index, (W, group) in enumerate(zip(each.groups, config.groups, strict=True))
            )
            for layer, each in enumerate(weights.layers)
        )
        self._frequencies = rope_frequencies(config).to(weights.embed.device)

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Logits [samples, vocab] in float32; writes the new keys and values into `kv`."""
        h = embedding(batch.ids, self._weights.embed)
        rotation = self._rotation(batch.positions, h.dtype)
        adapters = batch.adapters
        for layer, each in enumerate(self._weights.layers):
            qkv, o, gate_up, down = self._linears[layer]
            x = rms_norm(h, each.input_norm, self._config.rms_norm_eps)
            attended = self._attend(qkv(x, adapters), rotation, batch.attention, kv[layer])
            h = h + o(attended, adapters)
            x = rms_norm(h, each.post_norm, self._config.rms_norm_eps)
            gate, up = gate_up(x, adapters).chunk(2, dim=-1)
            h = h + down(silu(gate) * up, adapters)
        h = rms_norm(h[batch.last], self._weights.norm, self._config.rms_norm_eps)
        return linear(h, self._weights.head).float()

    def _attend(
        self, qkv: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan, kv: Tensor
    ) -> Tensor:
        """qkv [tokens, (heads + 2 kv) d] -> [tokens, heads d]."""
        config, tokens = self._config, qkv.shape[0]
        heads = qkv.view(tokens, -1, config.head_dim)
        rotate_(heads[:, : config.num_heads + config.num_kv_heads], rotation)
        new = heads[:, config.num_heads :].view(tokens, 2, config.num_kv_heads, config.head_dim)
        kv.view(-1, *new.shape[1:]).index_copy_(0, plan.writes, new)
        return plan.attend(heads[:, : config.num_heads], kv)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the first half negated: [tokens, 1, d]."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return both[0].to(dtype)[:, None], both[1].to(dtype)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), the mean in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rotate_(x: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
    """Rotary embedding in place: the halves (a, b) become (a cos - b sin, b cos + a sin)."""
    cos, sin = rotation
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, sin)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians a position, [d / 2]; with Llama 3.1's scaling where the config has it.

    Wavelengths beyond `trained / low` are stretched by `factor`, those under `trained / high` kept,
    those between mixed linearly in frequency.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.trained_tokens * frequencies / (2 * math.pi)  # over the trained context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
