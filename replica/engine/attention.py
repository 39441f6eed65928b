"""Paged attention in torch: keys and values gathered through block tables, then one fused kernel.

For the token at position p of a sequence:  o = softmax(q k_j / sqrt(d)) v_j  over its j <= p.

What is gathered and masked depends on the step, not on the layer, so it is planned once a step:

- Decoding rows are batched by context length, in classes of doubling size: padding then costs at
  most a factor of two, and there are few classes. The query heads that share a key head stand in
  for a query length, so keys are not repeated: q [n, kv, g, d] against k [n, kv, length, d].
- A prefilling row runs alone: its kv heads are the batch and keys are broadcast over g.

Padding pages are the arena's zero page, and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from replica.core.step import Row
from replica.engine.arena import Arena

_SMALLEST_CLASS_PAGES: Final = 4


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that attend together: n of them with t tokens each, n == 1 or t == 1."""

    tokens: Tensor | None  # [n * t] places in the step; None: they are the whole step, in order
    pages: Tensor  # [n * p]
    mask: Tensor  # added to the scores: [n, 1, 1, p * page_tokens] or [1, 1, t, p * page_tokens]
    rows: int
    decodes: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    writes: Tensor  # [tokens] places of the new keys and values, counted in tokens over all pages
    groups: tuple[_Group, ...]
    entered: tuple[int, ...]  # pages that a sequence writes to for the first time

    @classmethod
    def of(cls, rows: Sequence[Row], arena: Arena) -> AttentionPlan:
        size = arena.page_tokens
        writes: list[int] = []
        entered: list[int] = []
        classes: dict[int, list[tuple[int, Row]]] = {}  # pages a table is padded to -> decoding
        groups: list[_Group] = []
        for row in rows:
            at, used = len(writes), -(-row.end // size)
            writes += (
                row.pages[position // size] * size + position % size
                for position in range(row.start, row.end)
            )
            entered += row.pages[-(-row.start // size) : used]
            if len(row.tokens) == 1:
                padded = max(_SMALLEST_CLASS_PAGES, 1 << (used - 1).bit_length())
                classes.setdefault(padded, []).append((at, row))
            else:
                groups.append(_prefill(at, row, arena, alone=len(rows) == 1))
        for _, members in sorted(classes.items()):
            groups.append(_decode(members, arena, alone=len(members) == len(rows)))
        return cls(torch.tensor(writes, device=arena.device), tuple(groups), tuple(entered))

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        """q [tokens, heads, d]; kv is one layer's pages, the new tokens already in them.

        Returns [tokens, heads * d].
        """
        tokens = q.shape[0]
        if len(self.groups) == 1:
            return _attend(self.groups[0], q, kv).reshape(tokens, -1)
        out = torch.empty_like(q)
        for group in self.groups:
            assert group.tokens is not None
            out.index_copy_(0, group.tokens, _attend(group, q.index_select(0, group.tokens), kv))
        return out.view(tokens, -1)


def _decode(members: Sequence[tuple[int, Row]], arena: Arena, *, alone: bool) -> _Group:
    size, zero = arena.page_tokens, arena.zero_page
    used = [-(-row.end // size) for _, row in members]
    width = max(used)
    tables = [
        (*row.pages[:n], *[zero] * (width - n)) for n, (_, row) in zip(used, members, strict=True)
    ]
    ends = torch.tensor([row.end for _, row in members])
    hidden = torch.arange(width * size) >= ends[:, None]
    places = None if alone else torch.tensor([at for at, _ in members], device=arena.device)
    pages = torch.tensor(tables, device=arena.device).view(-1)
    return _Group(places, pages, _mask(hidden[:, None, None], arena), len(members), decodes=True)


def _prefill(at: int, row: Row, arena: Arena, *, alone: bool) -> _Group:
    used = -(-row.end // arena.page_tokens)
    positions = torch.arange(row.start, row.end)
    hidden = torch.arange(used * arena.page_tokens) > positions[:, None]
    places = None if alone else torch.arange(at, at + len(row.tokens), device=arena.device)
    pages = torch.tensor(row.pages[:used], device=arena.device)
    return _Group(places, pages, _mask(hidden[None, None], arena), rows=1, decodes=False)


def _mask(hidden: Tensor, arena: Arena) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=arena.dtype).masked_fill_(hidden, float("-inf"))
    return mask.to(arena.device)


def _attend(group: _Group, q: Tensor, kv: Tensor) -> Tensor:
    """q and the result: [n * t, heads, d]."""
    tokens, heads, width = q.shape
    kv_heads = kv.shape[-2]
    shared = heads // kv_heads
    gathered = kv.view(kv.shape[0], -1).index_select(0, group.pages)
    gathered = gathered.view(group.rows, -1, 2, kv_heads, width)  # [n, length, 2, kv, d]
    k, v = gathered.permute(2, 0, 3, 1, 4).unbind()  # [n, kv, length, d]
    if group.decodes:
        q = q.view(tokens, kv_heads, shared, width)
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        return out.reshape(tokens, heads, width)
    q = q.view(tokens, kv_heads, shared, width).permute(1, 2, 0, 3)  # [kv, g, t, d]
    k, v = (half.transpose(0, 1).expand(kv_heads, shared, half.shape[2], width) for half in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, width)
