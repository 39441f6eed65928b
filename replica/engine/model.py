"""The shared base: a decoder over pages, with every linear map open to adapters.

For each layer, with h [tokens, hidden]:

    h += o(attention(rope(qk_norm(qkv(norm(h))))))
    h += down(silu(gate(norm(h))) * up(norm(h)))

where only some families norm the heads of q and k, after an adapter has added its part. Llama,
Mistral and Qwen are this one pass; `family.py` says what they differ in. Tokens of all rows lie end
to end in one dimension; positions, pages and adapters are theirs alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from replica.engine.attention import AttentionPlan
from replica.engine.kernels import GatheredPlan
from replica.engine.lora import LoraLinear
from replica.engine.quantised import product
from replica.engine.rope import rope_frequencies
from replica.engine.weights import BaseWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as tensors."""

    ids: Tensor  # [tokens]
    positions: Tensor  # [tokens]
    attention: AttentionPlan
    adapters: GatheredPlan | None  # None: no row of the step has one
    last: Tensor  # [samples] the places that draw a token


class Model:
    def __init__(self, weights: BaseWeights) -> None:
        self._weights = weights
        self._config = config = weights.config
        self._linears = tuple(
            tuple(
                LoraLinear(W, bias, group, layer, index)
                for index, (W, bias, group) in enumerate(
                    zip(each.groups, each.biases, config.groups, strict=True)
                )
            )
            for layer, each in enumerate(weights.layers)
        )
        self._windowed = tuple(i in config.sliding_layers for i in range(config.num_layers))
        scaling = config.rope_scaling
        self._amplitude = 1.0 if scaling is None else scaling.amplitude
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, scaling)
        self._frequencies = frequencies.to(weights.embed.device)

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Hidden states [tokens, hidden]; writes the new keys and values into `kv`."""
        h = embedding(batch.ids, self._weights.embed)
        rotation = self._rotation(batch.positions, h.dtype)
        adapters = batch.adapters
        for layer, each in enumerate(self._weights.layers):
            qkv, o, gate_up, down = self._linears[layer]
            x = rms_norm(h, each.input_norm, self._config.rms_norm_eps)
            heads = self._rotated(qkv(x, adapters), each, rotation)
            attended = self._attend(heads, batch.attention, kv, layer)
            h = h + o(attended, adapters)
            x = rms_norm(h, each.post_norm, self._config.rms_norm_eps)
            gate, up = gate_up(x, adapters).chunk(2, dim=-1)
            h = h + down(silu(gate) * up, adapters)
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Of some tokens' hidden states [n, hidden]: [n, vocab] in float32."""
        h = rms_norm(h, self._weights.norm, self._config.rms_norm_eps)
        return product(h, self._weights.head, None).float()

    def _rotated(self, qkv: Tensor, layer: LayerWeights, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """qkv [tokens, (heads + 2 kv) d] -> [tokens, heads + 2 kv, d], queries and keys ready."""
        heads = qkv.view(qkv.shape[0], -1, self._config.head_dim)
        turning = heads[:, : -self._config.num_kv_heads]
        if layer.qk_norm is not None:
            turning.copy_(rms_norm(turning, layer.qk_norm, self._config.rms_norm_eps))
        rotate_(turning, rotation)
        return heads

    def _attend(self, heads: Tensor, plan: AttentionPlan, kv: Tensor, layer: int) -> Tensor:
        """Keep the new keys and values, then attend: [tokens, heads d]."""
        config = self._config
        new = heads[:, config.num_heads :].view(-1, 2, config.num_kv_heads, config.head_dim)
        plan.keep(new, kv, layer)
        queries = heads[:, : config.num_heads]
        return plan.attend(queries, kv, layer, windowed=self._windowed[layer])

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines, and sines with the first half negated: [tokens, 1, d]."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._amplitude, angles.sin() * self._amplitude
        both = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return both[0].to(dtype)[:, None], both[1].to(dtype)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps), over the last dimension, the mean in float32."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps) * weight


def rotate_(x: Tensor, rotation: tuple[Tensor, Tensor]) -> None:
    """Rotary embedding in place: the halves (a, b) become (a cos - b sin, b cos + a sin)."""
    cos, sin = rotation
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, sin)
