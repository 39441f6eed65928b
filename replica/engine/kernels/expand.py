"""Expand in Triton:  y[i, columns of s] += v_i,s Bt_slot(i),s  for the slices s of a group.

    v is what `shrink` left: float32 planes, added here in their order, or the reduced v
    y [rows, sum of N]; a program owns BN columns of one slice of its rows, so nothing races

`expand_rows` takes one row a program, in registers; `expand_tiles` a chunk of rows through
`tl.dot`, RB ranks at a time, the next ones on their way; `expand_columns` keeps a chunk's whole v
and streams COLUMNS tiles of Bt past it. A rank beyond the adapter's own costs neither bytes nor, in
steps of RB, time.

With PDL, Bt and y are loaded before the wait. y is safe to: the shrink lets this launch begin only
after its own wait, so what wrote y before the shrink is complete.
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
    y, pool, planes, sections, ranks, order, records, module, capacity, y_row,
    section_slot, rank_slot,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr,
    TILES: tl.constexpr, RB: tl.constexpr, BN: tl.constexpr, PLANES: tl.constexpr,
    PADDED: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = TILES * 16
    NT: tl.constexpr = (N0 + BN - 1) // BN + (N1 + BN - 1) // BN + (N2 + BN - 1) // BN
    e = tl.program_id(0) // NT
    part, number, width, start = _columns(tl.program_id(0) % NT, N0, N1, N2, BN)
    if EVEN:
        width = tl.multiple_of(width, 16)
    n = number * BN + tl.arange(0, BN)
    position = tl.load(records + e * 4)
    live = tl.load(records + e * 4 + 1) > 0
    slot = tl.load(records + e * 4 + 2)
    rank = tl.load(ranks + slot.to(tl.int64) * rank_slot + module + part)
    if live & (rank > 0):
        row = tl.load(order + position).to(tl.int64)
        offsets, exists = section(
            sections, ranks, slot, module + part, 1, 0, RB, True, section_slot, rank_slot, TILES
        )
        b = _load_b(pool, offsets, exists, n, width, RB, EVEN)
        at = y + row * y_row + start + n
        old = tl.load(at) if EVEN else tl.load(at, mask=n < width, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        stride = SLICES * capacity * R
        v_at = (part * capacity + position) * R
        if R <= RB:
            v = _row_v(planes, v_at, exists, stride, RB, PLANES, PADDED)
            acc = tl.sum(b.to(tl.float32) * v[:, None], axis=0)
        else:
            acc = tl.zeros((BN,), tl.float32)
            for first in range(0, rank, RB):
                here, was = b, exists
                offsets, exists = section(
                    sections, ranks, slot, module + part, 1, (first + RB) // 16, RB, True,
                    section_slot, rank_slot, TILES,
                )  # fmt: skip
                b = _load_b(pool, offsets, exists, n, width, RB, EVEN)
                v = _row_v(planes, v_at + first, was, stride, RB, PLANES, PADDED)
                acc += tl.sum(here.to(tl.float32) * v[:, None], axis=0)
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
def expand_tiles(  # type: ignore[no-untyped-def]
    y, pool, planes, v, sections, ranks, order, records, module, capacity, launched, y_row,
    section_slot, rank_slot,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr,
    TILES: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PLANES: tl.constexpr, PADDED: tl.constexpr, EVEN: tl.constexpr, REDUCED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = TILES * 16
    NT: tl.constexpr = (N0 + BN - 1) // BN + (N1 + BN - 1) // BN + (N2 + BN - 1) // BN
    e = tl.program_id(0) // NT
    part, number, width, start = _columns(tl.program_id(0) % NT, N0, N1, N2, BN)
    if EVEN:
        width = tl.multiple_of(width, 16)
    n = number * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    length = tl.load(records + e * 4 + 1)
    while length > 0:
        position = tl.load(records + e * 4)
        slot = tl.load(records + e * 4 + 2)
        rank = tl.load(ranks + slot.to(tl.int64) * rank_slot + module + part)
        e += launched
        after = tl.load(records + e * 4 + 1, mask=e < capacity, other=0)
        filled = m < length
        rows = tl.load(order + position + m, mask=filled, other=0).to(tl.int64)
        offsets, exists = section(
            sections, ranks, slot, module + part, 1, 0, RB, True, section_slot, rank_slot, TILES
        )
        b = _load_b(pool, offsets, exists, n, width, RB, EVEN)
        at = y + rows[:, None] * y_row + start + n[None, :]
        mask = (filled & (rank > 0))[:, None]
        if not EVEN:
            mask = mask & (n < width)[None, :]
        old = tl.load(at, mask=mask, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        stride = SLICES * capacity * R
        v_at = (part * capacity + position) * R
        if R <= RB:
            vs = _chunk_v(
                planes, v, v_at, filled, exists, stride, R, RB, BM, PLANES, PADDED, REDUCED
            )
            acc = tl.dot(vs.to(b.dtype), b, input_precision="ieee")
        else:
            acc = tl.zeros((BM, BN), tl.float32)
            for first in range(0, rank, RB):
                here, was = b, exists
                offsets, exists = section(
                    sections, ranks, slot, module + part, 1, (first + RB) // 16, RB, True,
                    section_slot, rank_slot, TILES,
                )  # fmt: skip
                b = _load_b(pool, offsets, exists, n, width, RB, EVEN)
                vs = _chunk_v(
                    planes, v, v_at + first, filled, was, stride, R, RB, BM, PLANES, PADDED,
                    REDUCED,
                )  # fmt: skip
                acc = tl.dot(vs.to(here.dtype), here, acc, input_precision="ieee")
        new = (old.to(tl.float32) + acc).to(y.dtype.element_ty)
        tl.store(at, new, mask=mask)
        length = after


@triton.jit(do_not_specialize=["module", "capacity", "launched"])
def expand_columns(  # type: ignore[no-untyped-def]
    y, pool, planes, v, sections, ranks, order, records, module, capacity, launched, y_row,
    section_slot, rank_slot,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, SLICES: tl.constexpr,
    TILES: tl.constexpr, RB: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    COLUMNS: tl.constexpr, PLANES: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, REDUCED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Needs RB >= 16 TILES: a chunk's v fits at once."""
    WIDE: tl.constexpr = BN * COLUMNS
    R: tl.constexpr = TILES * 16
    NT: tl.constexpr = (N0 + WIDE - 1) // WIDE + (N1 + WIDE - 1) // WIDE + (N2 + WIDE - 1) // WIDE
    e = tl.program_id(0) // NT
    part, number, width, start = _columns(tl.program_id(0) % NT, N0, N1, N2, WIDE)
    if EVEN:
        width = tl.multiple_of(width, 16)
    m = tl.arange(0, BM)
    length = tl.load(records + e * 4 + 1)
    while length > 0:
        position = tl.load(records + e * 4)
        slot = tl.load(records + e * 4 + 2)
        rank = tl.load(ranks + slot.to(tl.int64) * rank_slot + module + part)
        e += launched
        after = tl.load(records + e * 4 + 1, mask=e < capacity, other=0)
        filled = m < length
        rows = tl.load(order + position + m, mask=filled, other=0).to(tl.int64)
        offsets, exists = section(
            sections, ranks, slot, module + part, 1, 0, RB, True, section_slot, rank_slot, TILES
        )
        if PDL:
            tl.extra.cuda.gdc_wait()
        if rank > 0:
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
