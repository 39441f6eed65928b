"""Heads ready for attention, in one pass over q, k and v:

    q <- rope(norm(q)) in place;   page <- rope(norm(k)), v        for each token

where only some families norm the heads. A token's place is `position % page_tokens` of the page
that its sequence's table names for `position // page_tokens`; `kv[page, 0 or 1, place, head]` holds
its key and value. A token of position -1 is padding: nothing of it is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.engine.cuda.places import Places
from replica.engine.cuda.product import Product

_HEADS = 8
"""Heads a program turns at once."""


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    qkv, by_row, by_column, rotation, norms, kv, tables, seats, positions,
    heads, kv_heads, kv_page, kv_half, table_row, eps,
    SCALED: tl.constexpr, NORMED: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token)
    if position < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    lower = head[:, None] * D + i[None, :]
    upper = lower + D // 2
    total = heads + 2 * kv_heads
    live = (head < total)[:, None] & (i < D // 2)[None, :]
    row = qkv + token * total * D
    a0 = tl.load(row + lower, mask=live, other=0.0)
    b0 = tl.load(row + upper, mask=live, other=0.0)
    if SCALED:
        scale = tl.load(by_row + token)
        a0 = (a0.to(tl.float32) * scale * tl.load(by_column + lower, mask=live, other=0.0)).to(
            a0.dtype
        )
        b0 = (b0.to(tl.float32) * scale * tl.load(by_column + upper, mask=live, other=0.0)).to(
            b0.dtype
        )
    turns = (head < heads + kv_heads)[:, None]
    a, b = a0.to(tl.float32), b0.to(tl.float32)
    if NORMED:
        mean = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / D
        scale = 1 / tl.sqrt(mean + eps)
        normed = live & turns
        wa = tl.load(norms + lower, mask=normed, other=1.0).to(tl.float32)
        wb = tl.load(norms + upper, mask=normed, other=1.0).to(tl.float32)
        dtype = qkv.dtype.element_ty
        a = ((a * scale[:, None]).to(dtype).to(tl.float32) * wa).to(dtype).to(tl.float32)
        b = ((b * scale[:, None]).to(dtype).to(tl.float32) * wb).to(dtype).to(tl.float32)
    angle = rotation + position.to(tl.int64) * D + i
    cos = tl.load(angle, mask=i < D // 2, other=0.0)[None, :]
    sin = tl.load(angle + D // 2, mask=i < D // 2, other=0.0)[None, :]
    ra = tl.where(turns, (a * cos - b * sin).to(qkv.dtype.element_ty), a0)
    rb = tl.where(turns, (b * cos + a * sin).to(qkv.dtype.element_ty), b0)
    is_q = (head < heads)[:, None]
    tl.store(row + lower, ra, mask=live & is_q)
    tl.store(row + upper, rb, mask=live & is_q)
    seat = tl.load(seats + token).to(tl.int64)
    page = tl.load(tables + seat * table_row + position // PAGE).to(tl.int64)
    is_v = head >= heads + kv_heads
    place = kv + page * kv_page + (position % PAGE).to(tl.int64) * kv_heads * D
    at = head - heads - tl.where(is_v, kv_heads, 0)
    to = place + (tl.where(is_v, kv_half, 0) + at * D)[:, None] + i[None, :]
    tl.store(to, ra, mask=live & (head >= heads)[:, None])
    tl.store(to + D // 2, rb, mask=live & (head >= heads)[:, None])


def rotate(
    product: Product,
    kv: Tensor,
    places: Places,
    rotation: Tensor,
    norms: Tensor | None,
    eps: float,
) -> None:
    """product [tokens, (heads + 2 kv_heads) d], whose q are overwritten; kv [pages, 2, page_tokens,
    kv_heads, d], one layer's view of the pool; rotation [positions, d] as `rotations` makes it."""
    _, _, page, kv_heads, d = kv.shape
    qkv = product.raw
    total = qkv.shape[1] // d
    grid = (qkv.shape[0], triton.cdiv(total, _HEADS))
    _rotate[grid](
        qkv, *product.scales, rotation, rotation if norms is None else norms, kv,
        places.tables, places.seats, places.positions,
        total - 2 * kv_heads, kv_heads, kv.stride(0), kv.stride(1), places.tables.stride(0), eps,
        SCALED=product.scaled, NORMED=norms is not None, PAGE=page, D=d,
        HALF=triton.next_power_of_2(d // 2), HEADS=_HEADS, num_warps=4,
    )  # fmt: skip


def rotations(frequencies: Tensor, amplitude: float, positions: int) -> Tensor:
    """[positions, d] float32: the cosines of each pair of dimensions, then their sines."""
    angles = torch.arange(positions, device=frequencies.device)[:, None].float() * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude
