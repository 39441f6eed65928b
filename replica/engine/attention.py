"""Paged attention in torch: keys and values gathered through block tables, then one fused kernel.

For the token at position p of a sequence:  o = softmax(q k_j / sqrt(d)) v_j  over its j <= p, and
in a layer with a window of w tokens over its p - w < j <= p. Pages that lie wholly before a row's
windows are not gathered: such a layer costs the window, not the context, and it does not matter
whether they are RELEASED.

What one page holds of one layer are two blocks, of keys and of values, and the pool is a list of
them: block (page * layers + layer) * 2 + {0, 1}. Which blocks a step needs depends on the layer by
an offset only, and what it masks not at all, so it is planned once a step, for layer 0:

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
    blocks: Tensor  # [2, n * p] of keys and of values, in layer 0
    mask: Tensor  # added to the scores: [n, 1, 1, p * page_tokens] or [1, 1, t, p * page_tokens]
    rows: int
    decodes: bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    writes: Tensor  # [tokens * 2] places of new keys and values in layer 0, counted in tokens
    full: tuple[_Group, ...]  # empty where every layer has a window that a row outgrew
    windowed: tuple[_Group, ...]  # the same as `full` while no row outgrew the window
    entered: tuple[int, ...]  # pages that a sequence writes to for the first time

    @classmethod
    def of(cls, rows: Sequence[Row], arena: Arena) -> AttentionPlan:
        size, config = arena.page_tokens, arena.config
        stride = 2 * size * config.num_layers  # between pages, in tokens of a key or a value
        writes: list[int] = []
        entered: list[int] = []
        for row in rows:
            for position in range(row.start, row.end):
                key = row.pages[position // size] * stride + position % size
                writes += (key, key + size)
            entered += row.pages[-(-row.start // size) : -(-row.end // size)]
        window = config.sliding_window
        outgrown = window is not None and any(row.end > window for row in rows)
        full = () if outgrown and config.window is not None else _groups(rows, arena, None)
        windowed = _groups(rows, arena, window) if outgrown else full
        return cls(torch.tensor(writes, device=arena.device), full, windowed, tuple(entered))

    def keep(self, new: Tensor, kv: Tensor, layer: int) -> None:
        """Put keys and values [tokens, 2, kv, d] of a layer where they belong."""
        page_tokens = kv.shape[3]
        places = self.writes + 2 * page_tokens * layer
        kv.view(-1, *kv.shape[4:]).index_copy_(0, places, new.flatten(0, 1))

    def attend(self, q: Tensor, kv: Tensor, layer: int, *, windowed: bool = False) -> Tensor:
        """q [tokens, heads, d]; the new keys and values of the layer are in `kv` already.

        Returns [tokens, heads * d].
        """
        tokens = q.shape[0]
        groups = self.windowed if windowed else self.full
        blocks = kv.view(-1, kv.shape[3:].numel())
        if len(groups) == 1:
            return _attend(groups[0], q, blocks, kv, layer).reshape(tokens, -1)
        out = torch.empty_like(q)
        for group in groups:
            assert group.tokens is not None
            mine = q.index_select(0, group.tokens)
            out.index_copy_(0, group.tokens, _attend(group, mine, blocks, kv, layer))
        return out.view(tokens, -1)


def _groups(rows: Sequence[Row], arena: Arena, window: int | None) -> tuple[_Group, ...]:
    """All rows, for layers with this window or for those without one."""
    classes: dict[int, list[_Member]] = {}  # pages a table is padded to -> decoding
    groups: list[_Group] = []
    at = 0
    for row in rows:
        member = _Member.of(at, row, arena, window)
        if len(row.tokens) == 1:
            padded = max(_SMALLEST_CLASS_PAGES, 1 << (len(member.pages) - 1).bit_length())
            classes.setdefault(padded, []).append(member)
        else:
            groups.append(_prefill(member, arena, window, alone=len(rows) == 1))
        at += len(row.tokens)
    for _, members in sorted(classes.items()):
        groups.append(_decode(members, arena, window, alone=len(members) == len(rows)))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Member:
    """A row and the pages it attends to. Positions count from the first of these."""

    at: int  # place of its first token in the step
    tokens: int
    pages: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, at: int, row: Row, arena: Arena, window: int | None) -> _Member:
        size = arena.page_tokens
        first = 0 if window is None else max(0, row.start + 1 - window) // size
        pages = row.pages[first : -(-row.end // size)]
        return cls(at, len(row.tokens), pages, row.end - first * size)


def _decode(members: Sequence[_Member], arena: Arena, window: int | None, *, alone: bool) -> _Group:
    width = max(len(member.pages) for member in members)
    tables = [
        (*member.pages, *[arena.zero_page] * (width - len(member.pages))) for member in members
    ]
    keys = torch.arange(width * arena.page_tokens)
    ends = torch.tensor([member.end for member in members])[:, None]
    hidden = keys >= ends
    if window is not None:
        hidden |= keys < ends - window
    places = None if alone else torch.tensor([each.at for each in members], device=arena.device)
    blocks = _blocks([page for table in tables for page in table], arena)
    return _Group(places, blocks, _mask(hidden[:, None, None], arena), len(members), decodes=True)


def _prefill(member: _Member, arena: Arena, window: int | None, *, alone: bool) -> _Group:
    at, tokens = member.at, member.tokens
    keys = torch.arange(len(member.pages) * arena.page_tokens)
    queries = torch.arange(member.end - tokens, member.end)[:, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    places = None if alone else torch.arange(at, at + tokens, device=arena.device)
    blocks = _blocks(member.pages, arena)
    return _Group(places, blocks, _mask(hidden[None, None], arena), rows=1, decodes=False)


def _blocks(pages: Sequence[int], arena: Arena) -> Tensor:
    keys = torch.tensor(pages, device=arena.device) * (2 * arena.config.num_layers)
    return torch.stack((keys, keys + 1))


def _mask(hidden: Tensor, arena: Arena) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=arena.dtype).masked_fill_(hidden, float("-inf"))
    return mask.to(arena.device)


def _attend(group: _Group, q: Tensor, blocks: Tensor, kv: Tensor, layer: int) -> Tensor:
    """q and the result: [n * t, heads, d]."""
    tokens, heads, width = q.shape
    kv_heads = kv.shape[4]
    shared = heads // kv_heads
    k, v = (
        blocks.index_select(0, half).view(group.rows, -1, kv_heads, width).transpose(1, 2)
        for half in (group.blocks + 2 * layer).unbind()
    )  # [n, kv, length, d]
    if group.decodes:
        q = q.view(tokens, kv_heads, shared, width)
        out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
        return out.reshape(tokens, heads, width)
    q = q.view(tokens, kv_heads, shared, width).permute(1, 2, 0, 3)  # [kv, g, t, d]
    k, v = (half.transpose(0, 1).expand(kv_heads, shared, half.shape[2], width) for half in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=group.mask)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, width)
