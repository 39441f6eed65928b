"""Expand in Triton:  y[i, columns of s] += v_i,s Bt_slot(i),s  for the slices s of a group.

    v is what `shrink` left: float32 planes, added here in their order, or the reduced v
    y [rows, sum of N]; a program owns WIDE columns of one slice of its rows, so nothing races

`expand_rows` multiplies one row in registers, `expand_chunks` rows of one adapter through `tl.dot`.
Ranks beyond the adapter's own cost no bytes.

With PDL a row's Bt and y are loaded before the wait. y is safe to: the shrink lets this launch
begin only after its own wait, so what wrote y before the shrink is complete.
"""

from __future__ import annotations

import triton
import triton.language as tl

from replica.engine.kernels.shrink import section


@triton.jit
def _columns(  # type: ignore[no-untyped-def]
    tile, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Which slice a column tile is in, its number there, the slice's width, its first column."""
    T0: tl.constexpr = (N0 + BN - 1) // BN
    T1: tl.constexpr = T0 + (N1 + BN - 1) // BN
    part = (tile >= T0).to(tl.int32) + (tile >= T1).to(tl.int32)
    if N1 == 0:
        return 0 * part, tile, N0 + 0 * part, 0 * part
    number = tile - tl.where(part == 0, 0, tl.where(part == 1, T0, T1))
    width = tl.where(part == 0, N0, tl.where(part == 1, N1, N2))
    start = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    return part, number, width, start


@triton.jit
def _load_b(  # type: ignore[no-untyped-def]
    pool, offsets, exists, n, width, RB: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    r = tl.arange(0, RB) % 16
    at = pool + offsets[:, None] + r[:, None] * width + n[None, :]
    if EVEN:
        return tl.load(at, mask=exists[:, None], other=0.0)
    return tl.load(at, mask=exists[:, None] & (n < width)[None, :], other=0.0)


@triton.jit
def _row_v(  # type: ignore[no-untyped-def]
    planes, at, exists, stride, RB: tl.constexpr, PLANES: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """v [RB] of one row: one load of all its planes, so that they travel together."""
    c = tl.arange(0, PADDED)[:, None]
    r = tl.arange(0, RB)[None, :]
    mask = (c < PLANES) & exists[None, :]
    return tl.sum(
        tl.load(planes + c * stride + at + r, mask=mask, other=0.0, cache_modifier=".cg"), axis=0
    )


@triton.jit(do_not_specialize=["module", "capacity"])
def expand_rows(  # type: ignore[no-untyped-def]
    y, pool, planes, sections, ranks, order, records, module, capacity, y_row, section_slot,
    rank_slot,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr,
    TILES: tl.constexpr, RB: tl.constexpr, WIDE: tl.constexpr, PLANES: tl.constexpr,
    PADDED: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RB ranks at a time; where the next ones lie is looked up while these travel."""
    R: tl.constexpr = TILES * 16
    NT: tl.constexpr = (N0 + WIDE - 1) // WIDE + (N1 + WIDE - 1) // WIDE + (N2 + WIDE - 1) // WIDE
    e = tl.program_id(0) // NT
    part, number, width, start = _columns(tl.program_id(0) % NT, N0, N1, N2, WIDE)
    if EVEN:
        width = tl.multiple_of(width, 16)
    n = number * WIDE + tl.arange(0, WIDE)
    position = tl.load(records + e * 4)
    live = tl.load(records + e * 4 + 1) > 0
    slot = tl.load(records + e * 4 + 2)
    offsets, exists = section(
        sections, ranks, slot, module + part, 1, 0, RB, live, section_slot, rank_slot, TILES
    )
    rank = tl.load(
        ranks + slot.to(tl.int64) * rank_slot + module + part, mask=live, other=0,
        eviction_policy="evict_last",
    )  # fmt: skip
    if rank > 0:
        row = tl.load(order + position).to(tl.int64)
        b = _load_b(pool, offsets, exists, n, width, RB, EVEN)
        if R > RB:
            offsets, exists_next = section(
                sections, ranks, slot, module + part, 1, RB // 16, RB, True, section_slot,
                rank_slot, TILES,
            )  # fmt: skip
        at = y + row * y_row + start + n
        old = tl.load(at) if EVEN else tl.load(at, mask=n < width, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        stride = SLICES * capacity * R
        v_at = (part * capacity + position) * R
        v = _row_v(planes, v_at, exists, stride, RB, PLANES, PADDED)
        acc = tl.sum(b.to(tl.float32) * v[:, None], axis=0)
        if R > RB:
            for first in range(RB, rank, RB):
                exists = exists_next
                b = _load_b(pool, offsets, exists, n, width, RB, EVEN)
                v = _row_v(planes, v_at + first, exists, stride, RB, PLANES, PADDED)
                offsets, exists_next = section(
                    sections, ranks, slot, module + part, 1, (first + RB) // 16, RB, True,
                    section_slot, rank_slot, TILES,
                )  # fmt: skip
                acc += tl.sum(b.to(tl.float32) * v[:, None], axis=0)
        new = (old.to(tl.float32) + acc).to(y.dtype.element_ty)
        if EVEN:
            tl.store(at, new)
        else:
            tl.store(at, new, mask=n < width)


@triton.jit
def _chunk_v(  # type: ignore[no-untyped-def]
    planes, v, at, filled, exists, stride, R: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr,
    PLANES: tl.constexpr, PADDED: tl.constexpr, REDUCED: tl.constexpr,
):  # fmt: skip
    """v [BM, RB] of a chunk."""
    m = tl.arange(0, BM)
    r = tl.arange(0, RB)
    if REDUCED:
        mask = filled[:, None] & exists[None, :]
        return tl.load(v + at + m[:, None] * R + r[None, :], mask=mask, other=0.0)
    else:
        c = tl.arange(0, PADDED)[:, None, None]
        mask = (c < PLANES) & filled[None, :, None] & exists[None, None, :]
        place = c * stride + at + m[None, :, None] * R + r[None, None, :]
        parts = tl.load(planes + place, mask=mask, other=0.0, cache_modifier=".cg")
        return tl.sum(parts, axis=0).to(v.dtype.element_ty)


@triton.jit(do_not_specialize=["module", "capacity", "launched"])
def expand_chunks(  # type: ignore[no-untyped-def]
    y, pool, planes, v, sections, ranks, order, records, module, capacity, launched, y_row,
    section_slot, rank_slot,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr,
    TILES: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr, WIDE: tl.constexpr, BN: tl.constexpr,
    PLANES: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    REDUCED: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All of a chunk's v at once, RB >= 16 TILES, and BN columns after BN columns past it."""
    NT: tl.constexpr = (N0 + WIDE - 1) // WIDE + (N1 + WIDE - 1) // WIDE + (N2 + WIDE - 1) // WIDE
    R: tl.constexpr = TILES * 16
    e = tl.program_id(0) // NT
    part, number, width, start = _columns(tl.program_id(0) % NT, N0, N1, N2, WIDE)
    if EVEN:
        width = tl.multiple_of(width, 16)
    m = tl.arange(0, BM)
    length = tl.load(records + e * 4 + 1)
    while length > 0:
        position = tl.load(records + e * 4)
        slot = tl.load(records + e * 4 + 2)
        rank = tl.load(
            ranks + slot.to(tl.int64) * rank_slot + module + part, eviction_policy="evict_last"
        )
        after = 0
        if LOOP:
            e += launched
            after = tl.load(records + e * 4 + 1, mask=e < capacity, other=0)
        if rank > 0:
            filled = m < length
            rows = tl.load(order + position + m, mask=filled, other=0).to(tl.int64)
            offsets, exists = section(
                sections, ranks, slot, module + part, 1, 0, RB, True, section_slot, rank_slot,
                TILES,
            )  # fmt: skip
            if PDL:
                tl.extra.cuda.gdc_wait()
            stride = SLICES * capacity * R
            v_at = (part * capacity + position) * R
            vs = _chunk_v(
                planes, v, v_at, filled, exists, stride, R, RB, BM, PLANES, PADDED, REDUCED
            )
            vs = vs.to(pool.dtype.element_ty)
            for step in tl.range(0, WIDE, BN, num_stages=STAGES):
                n = number * WIDE + step + tl.arange(0, BN)
                b = _load_b(pool, offsets, exists, n, width, RB, EVEN)
                at = y + rows[:, None] * y_row + start + n[None, :]
                mask = filled[:, None]
                if not EVEN:
                    mask = mask & (n < width)[None, :]
                old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                acc = tl.dot(vs, b, input_precision="ieee")
                tl.store(at, (old + acc).to(y.dtype.element_ty), mask=mask)
        length = after
