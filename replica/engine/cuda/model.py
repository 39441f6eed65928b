"""The decoder of `engine.model` in fused kernels: the same function, a tenth of the launches.

What a layer costs beside its four matrix products: two norms that also add, one pass that turns the
heads and keeps keys and values, attention over pages, one gate. Nothing here reads a length on the
host, allocates by one, or waits for the device: with `Batch` in buffers that stay, a whole pass can
be captured once and replayed for any rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from replica.engine.cuda.activation import gated
from replica.engine.cuda.decode import attend_rows
from replica.engine.cuda.linear import Dense, Float8, Linear
from replica.engine.cuda.norm import Rows, add_norm, quantise
from replica.engine.cuda.places import Places
from replica.engine.cuda.prefill import attend_stretches
from replica.engine.cuda.rotate import rotate, rotations
from replica.engine.model_config import Group, ModelConfig
from replica.engine.rope import rope_frequencies
from replica.engine.weights import BaseWeights


class Gathered(Protocol):
    """The adapters' part of a step."""

    def add(self, x: Tensor, y: Tensor, layer: int, index: int, group: Group) -> None:
        """y [tokens, sum of out] += the adapters' product with x [tokens, in], in place."""


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [tokens]
    places: Places
    single: Tensor | None  # int32 [rows]: tokens that alone are new in their sequence
    blocks: Tensor | None  # int32 [blocks, 2]: the other tokens, as `prefill.py` cuts them
    adapters: Gathered | None  # None: no row has one
    last: Tensor | None  # [samples] tokens whose logits are wanted; None: all, in order


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    linears: tuple[Linear, ...]
    qk_norm: Tensor | None
    window: int | None


class CudaModel:
    def __init__(self, weights: BaseWeights, *, positions: int, float8: bool = False) -> None:
        """`positions` that sequences may reach. With `float8` the layers' matrices are quantised
        one at a time, and `weights` is emptied of them so that both are never held."""
        self.config: ModelConfig = weights.config
        self._embed, self._norm, self._head = weights.embed, weights.norm, weights.head
        config, self._float8 = weights.config, float8
        self._layers = tuple(
            _Layer(
                each.input_norm,
                each.post_norm,
                tuple(
                    Float8.of(W, bias) if float8 else Dense(W, bias)
                    for W, bias in zip(each.groups, each.biases, strict=True)
                ),
                each.qk_norm,
                config.sliding_window if layer in config.sliding_layers else None,
            )
            for layer, each in enumerate(weights.layers)
        )
        scaling = config.rope_scaling
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, scaling)
        self._rotation = rotations(
            frequencies.to(weights.embed.device),
            1.0 if scaling is None else scaling.amplitude,
            positions,
        )

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Logits [samples, vocab] in float32; writes the new keys and values into `kv`
        [pages, layers, 2, page_tokens, kv_heads, d]."""
        h = embedding(batch.ids, self._embed)
        delta = None
        for index, layer in enumerate(self._layers):
            delta = self._layer(batch, kv[:, index], h, delta, index, layer)
        if batch.last is not None:
            h, delta = h[batch.last], None if delta is None else delta[batch.last]
        x = add_norm(h, delta, self._norm, self.config.rms_norm_eps).x
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self._head.t(), out_dtype=torch.float32)
        return linear(x, self._head).float()

    def _layer(
        self, batch: Batch, kv: Tensor, h: Tensor, delta: Tensor | None, index: int, layer: _Layer
    ) -> Tensor:
        """Changes h [tokens, hidden] in place; returns what is still to be added to it."""
        config, groups = self.config, self.config.groups
        eps, float8 = config.rms_norm_eps, self._float8

        def apply(which: int, rows: Rows) -> Tensor:
            y = layer.linears[which](rows)
            if batch.adapters is not None:
                batch.adapters.add(rows.x, y, index, which, groups[which])
            return y

        qkv = apply(0, add_norm(h, delta, layer.input_norm, eps, quantised=float8))
        rotate(qkv, kv, batch.places, self._rotation, layer.qk_norm, eps)
        attended = torch.empty(
            h.shape[0], config.num_heads * config.head_dim, dtype=h.dtype, device=h.device
        )
        if batch.single is not None:
            attend_rows(qkv, kv, attended, batch.places, batch.single, layer.window)
        if batch.blocks is not None:
            attend_stretches(qkv, kv, attended, batch.places, batch.blocks, layer.window)
        o = apply(1, quantise(attended) if float8 else Rows(attended))
        gate_up = apply(2, add_norm(h, o, layer.post_norm, eps, quantised=float8))
        inner = gated(gate_up)
        return apply(3, quantise(inner) if float8 else Rows(inner))
