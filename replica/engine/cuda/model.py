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
from replica.engine.cuda.linear import Linear
from replica.engine.cuda.norm import Rows, add_norm, quantise
from replica.engine.cuda.places import Places
from replica.engine.cuda.prefill import attend_stretches
from replica.engine.cuda.product import Product
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
    blocks: tuple[Tensor, Tensor] | None  # the other tokens, as `prefill.py` cuts them
    adapters: Gathered | None  # None: no row has one


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    linears: tuple[Linear, ...]
    qk_norm: Tensor | None
    window: int | None


class CudaModel:
    def __init__(self, weights: BaseWeights, *, positions: int) -> None:
        """`positions` is how many a sequence may have."""
        self.config: ModelConfig = weights.config
        self._embed, self._norm = weights.embed, weights.norm
        assert isinstance(weights.head, Tensor), (
            "the head is not quantised, and packed for CPUs only"
        )
        self._head = weights.head
        config = weights.config
        self._layers = tuple(
            _Layer(
                each.input_norm,
                each.post_norm,
                tuple(map(Linear.of, each.groups, each.biases)),
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
        """Hidden states [tokens, hidden]; writes the new keys and values into `kv`
        [pages, layers, 2, page_tokens, kv_heads, d]."""
        h = embedding(batch.ids, self._embed)
        delta: Product | None = None
        for index, layer in enumerate(self._layers):
            delta = self._layer(batch, kv[:, index], h, delta, index, layer)
        return h if delta is None else h.add_(delta.settle())

    def logits(self, h: Tensor, out: Tensor | None = None) -> Tensor:
        """Of some tokens' hidden states [n, hidden], contiguous: [n, vocab] in float32, in `out`
        where it is given."""
        x = add_norm(h, None, self._norm, self.config.rms_norm_eps).x
        if out is None:
            out = torch.empty(x.shape[0], self._head.shape[0], dtype=torch.float32, device=x.device)
        if x.is_cuda and x.dtype != torch.float32:  # summed and kept in float32
            return torch.ops.aten.mm.dtype_out(x, self._head.t(), torch.float32, out=out)
        return out.copy_(linear(x, self._head))

    def _layer(
        self, batch: Batch, kv: Tensor, h: Tensor, delta: Product | None, index: int, layer: _Layer
    ) -> Product:
        """Changes h [tokens, hidden] in place; returns what is still to be added to it."""
        config, groups = self.config, self.config.groups
        eps, linears = config.rms_norm_eps, layer.linears

        def apply(which: int, rows: Rows) -> Product:
            product = linears[which](rows)
            if batch.adapters is None:
                return product
            y = product.settle()
            batch.adapters.add(rows.x, y, index, which, groups[which])
            return Product(y)

        qkv = apply(0, add_norm(h, delta, layer.input_norm, eps, quantised=linears[0].quantised))
        rotate(qkv, kv, batch.places, self._rotation, layer.qk_norm, eps)
        width = config.num_heads * config.head_dim
        made = torch.empty if batch.blocks is None else torch.zeros  # padding is in no block
        attended = made(h.shape[0], width, dtype=h.dtype, device=h.device)
        if batch.single is not None:
            attend_rows(qkv.raw, kv, attended, batch.places, batch.single, layer.window)
        if batch.blocks is not None:
            attend_stretches(qkv.raw, kv, attended, batch.places, batch.blocks, layer.window)
        o = apply(1, quantise(attended) if linears[1].quantised else Rows(attended))
        x = add_norm(h, o, layer.post_norm, eps, quantised=linears[2].quantised)
        inner = gated(apply(2, x))
        return apply(3, quantise(inner) if linears[3].quantised else Rows(inner))
