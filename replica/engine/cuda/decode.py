"""Paged attention for rows of one token: each reads the keys of its own context, and no more.

    o = softmax(scale q k_j) v_j    over j <= p, and in a layer with a window over p - window < j

for the token at position p. One program takes a row, one key head with the query heads that share
it, and one of SPLITS equal shares of the row's blocks of keys; shares of one row are merged by a
second kernel from (sum, maximum) in fixed order. Few rows take many splits, so that the device is
full; many rows take one, and nothing is merged. Nothing here depends on lengths at launch, so one
graph serves them all. Masked keys are not loaded: what a page held before reaches nobody.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from replica.engine.cuda.places import Places

_BLOCK: Final = 64
"""Keys a step of the loop."""

_PROGRAMS: Final = 1024
"""About what fills the device, several to a multiprocessor."""

_SPLITS_MAX: Final = 64
_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, kv, out, sums, peaks, tables, seats, positions, tokens,
    scale, window, q_row, kv_page, kv_half, table_row, kv_heads,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(tokens + row).to(tl.int64)
    length = tl.load(positions + token) + 1
    seat = tl.load(seats + token).to(tl.int64)
    first = tl.maximum(length - window, 0)
    begin = first // BLOCK
    blocks = tl.cdiv(length, BLOCK)
    share = tl.cdiv(blocks - begin, SPLITS)
    begin += split * share
    end = tl.minimum(begin + share, blocks)

    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, D_PADDED)
    n = tl.arange(0, BLOCK)
    live_q = (g < GROUP)[:, None] & (d < D)[None, :]
    heads = head * GROUP + g
    qs = tl.load(q + token * q_row + heads[:, None] * D + d[None, :], mask=live_q, other=0.0)
    peak = tl.full((GROUP_PADDED,), -1e30, dtype=tl.float32)
    total = tl.zeros((GROUP_PADDED,), dtype=tl.float32)
    acc = tl.zeros((GROUP_PADDED, D_PADDED), dtype=tl.float32)
    for block in range(begin, end):
        at = block * BLOCK + n
        live = (at < length) & (at >= first)
        page = tl.load(tables + seat * table_row + at // PAGE, mask=live, other=0).to(tl.int64)
        place = page * kv_page + ((at % PAGE) * kv_heads + head) * D
        live_kv = live[:, None] & (d < D)[None, :]
        keys = tl.load(kv + place[:, None] + d[None, :], mask=live_kv, other=0.0)
        values = tl.load(kv + kv_half + place[:, None] + d[None, :], mask=live_kv, other=0.0)
        s = tl.dot(qs, tl.trans(keys), input_precision="ieee") * scale
        s = tl.where(live[None, :], s, -1e30)
        top = tl.maximum(peak, tl.max(s, axis=1))
        shrunk = tl.exp2(peak - top)
        p = tl.where(live[None, :], tl.exp2(s - top[:, None]), 0.0)
        total = total * shrunk + tl.sum(p, axis=1)
        acc = acc * shrunk[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        peak = top

    if SPLITS == 1:
        o = acc / tl.maximum(total, 1e-30)[:, None]
        to = out + (token * kv_heads * GROUP + heads[:, None]) * D + d[None, :]
        tl.store(to, o.to(out.dtype.element_ty), mask=live_q)
    else:
        share_at = ((row * kv_heads + head) * GROUP + g) * SPLITS + split
        to = sums + share_at.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(to, acc, mask=live_q)
        both = peaks + share_at.to(tl.int64) * 2
        tl.store(both, peak, mask=g < GROUP)
        tl.store(both + 1, total, mask=g < GROUP)


@triton.jit
def _merge(  # type: ignore[no-untyped-def]
    sums, peaks, out, tokens,
    SPLITS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    token = tl.load(tokens + row).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D_PADDED)
    at = (row * heads + head).to(tl.int64) * SPLITS + s
    peak = tl.load(peaks + at * 2)
    total = tl.load(peaks + at * 2 + 1)
    weight = tl.exp2(peak - tl.max(peak, axis=0))
    whole = tl.sum(total * weight, axis=0)
    mask = (total > 0)[:, None] & (d < D)[None, :]
    parts = tl.load(sums + at[:, None] * D + d[None, :], mask=mask, other=0.0)
    o = tl.sum(parts * weight[:, None], axis=0) / tl.maximum(whole, 1e-30)
    to = out + (token * heads + head) * D + d
    tl.store(to, o.to(out.dtype.element_ty), mask=d < D)


def splits_for(rows: int, kv_heads: int) -> int:
    """Shares a row's context is cut into when there are so many rows: a power of four, so that few
    kernels are compiled."""
    wanted = max(1, _PROGRAMS // (rows * kv_heads))
    return min(_SPLITS_MAX, 4 ** ((wanted.bit_length() - 1) // 2))


def attend_rows(
    qkv: Tensor, kv: Tensor, out: Tensor, places: Places, tokens: Tensor, window: int | None
) -> None:
    """For the tokens at `tokens` [rows] int32, each the newest of its sequence.

    qkv [all tokens, (heads + 2 kv_heads) d], rotated; kv [pages, 2, page_tokens, kv_heads, d], one
    layer's, the new tokens in it; out [all tokens, heads d], of which those rows are written.
    """
    _, _, page, kv_heads, d = kv.shape
    rows, heads = tokens.shape[0], out.shape[1] // d
    splits = splits_for(rows, kv_heads)
    group = heads // kv_heads
    padded = triton.next_power_of_2(d)
    sums = peaks = out
    if splits > 1:
        sums = torch.empty(rows * heads * splits * d, dtype=torch.float32, device=out.device)
        peaks = torch.empty(rows * heads * splits * 2, dtype=torch.float32, device=out.device)
    _attend[(rows, kv_heads, splits)](
        qkv, kv, out, sums, peaks, places.tables, places.seats, places.positions, tokens,
        _LOG2_E / d**0.5, window or 1 << 30,
        qkv.stride(0), kv.stride(0), kv.stride(1), places.tables.stride(0), kv_heads,
        SPLITS=splits, GROUP=group, GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        PAGE=page, D=d, D_PADDED=padded, BLOCK=_BLOCK,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows, heads)](
            sums, peaks, out, tokens, SPLITS=splits, D=d, D_PADDED=padded, num_warps=2
        )
