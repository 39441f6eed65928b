"""Paged causal attention for stretches of new tokens, whatever stands before them.

    o_i = softmax(scale q_i k_j) v_j    over j <= p_i, and with a window over p_i - window < j

A stretch is cut into blocks of consecutive tokens of one sequence. One program takes such a block
and one key head, with all the query heads that share it, and walks the keys from the first that any
of its tokens sees to the last. New and old keys are read alike, from pages; those that none of its
tokens sees are not loaded, for their pages may be released.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from replica.engine.cuda.places import Places

_ROWS: Final = 128
"""Pairs of token and query head in one program."""

_BLOCK: Final = 64
_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    q, kv, out, tables, seats, positions, blocks, counts,
    scale, window, q_row, kv_page, kv_half, table_row, kv_heads,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    count = tl.load(counts + tl.program_id(0))
    start = tl.load(positions + token)
    seat = tl.load(seats + token).to(tl.int64)

    m = tl.arange(0, ROWS)
    d = tl.arange(0, D_PADDED)
    n = tl.arange(0, BLOCK)
    i = m // GROUP_PADDED
    g = m % GROUP_PADDED
    live_m = (i < count) & (g < GROUP)
    live_q = live_m[:, None] & (d < D)[None, :]
    heads = head * GROUP + g
    qs = tl.load(
        q + (token + i)[:, None] * q_row + heads[:, None] * D + d[None, :], mask=live_q, other=0.0
    )
    at_q = start + i
    length = start + count
    first = tl.maximum(start + 1 - window, 0)
    peak = tl.full((ROWS,), -1e30, dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, D_PADDED), dtype=tl.float32)
    for block in range(first // BLOCK, tl.cdiv(length, BLOCK)):
        at = block * BLOCK + n
        live = (at < length) & (at >= first)
        page = tl.load(tables + seat * table_row + at // PAGE, mask=live, other=0).to(tl.int64)
        place = page * kv_page + ((at % PAGE) * kv_heads + head) * D
        live_kv = live[:, None] & (d < D)[None, :]
        keys = tl.load(kv + place[:, None] + d[None, :], mask=live_kv, other=0.0)
        s = tl.dot(qs, tl.trans(keys), input_precision="ieee") * scale
        seen = (at[None, :] <= at_q[:, None]) & (at[None, :] > at_q[:, None] - window)
        s = tl.where(seen, s, -1e30)
        top = tl.maximum(peak, tl.max(s, axis=1))
        shrunk = tl.exp2(peak - top)
        p = tl.where(seen, tl.exp2(s - top[:, None]), 0.0)
        total = total * shrunk + tl.sum(p, axis=1)
        values = tl.load(kv + kv_half + place[:, None] + d[None, :], mask=live_kv, other=0.0)
        acc = acc * shrunk[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
        peak = top
    o = acc / tl.maximum(total, 1e-30)[:, None]
    to = out + ((token + i)[:, None] * kv_heads * GROUP + heads[:, None]) * D + d[None, :]
    tl.store(to, o.to(out.dtype.element_ty), mask=live_q)


def tokens_a_block(heads: int, kv_heads: int) -> int:
    """How many consecutive tokens of one sequence a block may hold."""
    return max(1, _ROWS // triton.next_power_of_2(heads // kv_heads))


def attend_stretches(
    qkv: Tensor,
    kv: Tensor,
    out: Tensor,
    places: Places,
    blocks: tuple[Tensor, Tensor],
    window: int | None,
) -> None:
    """For `blocks`, int32 [n] each: the first token, and how many from it on.

    The rest is as in `decode.attend_rows`.
    """
    _, _, page, kv_heads, d = kv.shape
    group = out.shape[1] // d // kv_heads
    padded = triton.next_power_of_2(group)
    _attend[(blocks[0].shape[0], kv_heads)](
        qkv, kv, out, places.tables, places.seats, places.positions, *blocks,
        _LOG2_E / d**0.5, window or 1 << 30,
        qkv.stride(0), kv.stride(0), kv.stride(1), places.tables.stride(0), kv_heads,
        GROUP=group, GROUP_PADDED=padded, ROWS=max(_ROWS, padded), PAGE=page, D=d,
        D_PADDED=triton.next_power_of_2(d), BLOCK=_BLOCK,
        num_warps=8, num_stages=2,
    )  # fmt: skip
