"""Shrink in Triton:  v_i = x_i A_slot(i)ᵀ for the slices of a group, in float32, split along K.

    x [rows, K], planes [K / BK, slices, rows, R]: plane c holds the products over columns
    c BK : (c + 1) BK, of the rows in the order of the step's metadata; only true ranks are written

A program takes one record and one plane. `shrink_rows` multiplies a row and a 16-wide rank tile in
registers, all of BK at once: with a row or two an adapter the weights' bytes are all the time there
is, and a tensor core's tile would be padding. `shrink_chunks` takes rows of one adapter through
`tl.dot`, BKI columns at a time. With REDUCE the program of a chunk that comes last adds up its
planes in order and leaves v in the rows' own type: for prefill, where every column tile of the
expand would read all planes again.

Weights are read through the arena's tables, so adapters of any rank lie anywhere. The tables' lines
are asked to stay in the L2 cache, which a layer's weights would otherwise sweep. With PDL a row's
weights are loaded before the wait for the launch before this one: an adapter must lie in its pages
before the graph that may read it is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def section(  # type: ignore[no-untyped-def]
    sections, ranks, slot, module, side, first, width: tl.constexpr, live, section_slot, rank_slot,
    TILES: tl.constexpr,
):  # fmt: skip
    """Offsets in the pool of ranks `16 first + (0 .. width)` of a module, and which of them exist.

    `side` is 0 for A and 1 for Bt; each rank's offset is its tile's, plus its place there by row.
    """
    r = tl.arange(0, width)
    slot = slot.to(tl.int64)
    rank = tl.load(
        ranks + slot * rank_slot + module, mask=live, other=0, eviction_policy="evict_last"
    )
    table = sections + slot * section_slot + (module * 2 + side) * TILES
    if width <= 16:
        offset = tl.load(
            table + first, mask=live & (first < TILES), other=-1, eviction_policy="evict_last"
        )
        exists = (first * 16 + r < rank) & (offset >= 0)
        offsets = tl.multiple_of(tl.where(offset < 0, 0, offset), 16) + tl.zeros_like(r)
    else:
        tile = first + r // 16
        offsets = tl.load(
            table + tile, mask=live & (tile < TILES), other=-1, eviction_policy="evict_last"
        )
        exists = (first * 16 + r < rank) & (offsets >= 0)
        offsets = tl.where(offsets < 0, 0, offsets)
    return tl.multiple_of(offsets, 16), exists


@triton.jit
def _row_product(  # type: ignore[no-untyped-def]
    a, x, row, planes, plane_row, k, exists, r, x_row, K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    if EVEN:
        xs = tl.load(x + row * x_row + k)
    else:
        xs = tl.load(x + row * x_row + k, mask=k < K, other=0.0)
    acc = tl.sum(a.to(tl.float32) * xs.to(tl.float32)[None, :], axis=1)
    tl.store(planes + plane_row + r, acc, mask=exists)


@triton.jit
def _row_weights(  # type: ignore[no-untyped-def]
    pool, sections, ranks, slot, module, tile, live, section_slot, rank_slot, k,
    K: tl.constexpr, TILES: tl.constexpr, TR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A [TR, BK] of one rank tile, and which of its ranks exist; nothing where not `live`."""
    r = tl.arange(0, TR)
    offsets, exists = section(
        sections, ranks, slot, module, 0, tile, TR, live, section_slot, rank_slot, TILES
    )
    at = pool + offsets[:, None] + r[:, None] * K + k[None, :]
    if EVEN:
        return tl.load(at, mask=exists[:, None], other=0.0), exists
    else:
        return tl.load(at, mask=exists[:, None] & (k < K)[None, :], other=0.0), exists


@triton.jit
def _chunk_product(  # type: ignore[no-untyped-def]
    x, pool, v, locks, sections, ranks, order, position, length, slot, first, lock, module, part,
    plane, capacity, x_row, section_slot, rank_slot, planes,
    K: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr, TR: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, BKI: tl.constexpr, STAGES: tl.constexpr, REDUCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One chunk's part of one plane; with REDUCE also the sum, by whoever comes last."""
    rank = tl.load(
        ranks + slot.to(tl.int64) * rank_slot + module + part, eviction_policy="evict_last"
    )
    PLANES: tl.constexpr = (K + BK - 1) // BK
    EVEN: tl.constexpr = K % BK == 0
    R: tl.constexpr = TILES * 16
    if first * 16 < rank:
        r = tl.arange(0, TR)
        m = tl.arange(0, BM)
        k = plane * BK + tl.arange(0, BKI)
        filled = m < length
        rows = tl.load(order + position + m, mask=filled, other=0).to(tl.int64)
        offsets, exists = section(
            sections, ranks, slot, module + part, 0, first, TR, True, section_slot, rank_slot, TILES
        )
        a_at = pool + offsets[:, None] + (r % 16)[:, None] * K + k[None, :]
        x_at = x + rows[:, None] * x_row + k[None, :]
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        acc = tl.zeros((BM, TR), tl.float32)
        for step in tl.range(0, BK, BKI, num_stages=STAGES):
            if EVEN:
                a = tl.load(a_at + step, mask=exists[:, None], other=0.0)
                xs = tl.load(x_at + step, mask=filled[:, None], other=0.0)
            else:
                inside = (k + step < K)[None, :]
                a = tl.load(a_at + step, mask=exists[:, None] & inside, other=0.0)
                xs = tl.load(x_at + step, mask=filled[:, None] & inside, other=0.0)
            acc = tl.dot(xs, tl.trans(a), acc, input_precision="ieee")
        mask = filled[:, None] & exists[None, :]
        place = (part * capacity + position + m)[:, None] * R + first * 16 + r[None, :]
        if not REDUCE:
            tl.store(planes + plane * SLICES * capacity * R + place, acc, mask=mask)
        elif PLANES == 1:
            tl.store(v + place, acc.to(v.dtype.element_ty), mask=mask)
        else:
            tl.store(planes + plane * SLICES * capacity * R + place, acc, mask=mask)
            tl.debug_barrier()
            if tl.atomic_add(locks + lock, 1, sem="acq_rel", scope="gpu") == PLANES - 1:
                acc = tl.zeros((BM, TR), tl.float32)
                for c in tl.static_range(PLANES):
                    at = planes + c * SLICES * capacity * R + place
                    acc += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
                tl.store(v + place, acc.to(v.dtype.element_ty), mask=mask)
                tl.store(locks + lock, 0)


@triton.jit(do_not_specialize=["module", "capacity", "launched", "last"])
def shrink_rows(  # type: ignore[no-untyped-def]
    x, pool, planes, sections, ranks, order, records, module, capacity, launched, last, x_row,
    section_slot, rank_slot,
    K: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr, TR: tl.constexpr, BK: tl.constexpr,
    LOOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = (K + BK - 1) // BK
    EVEN: tl.constexpr = K % BK == 0
    R: tl.constexpr = TILES * 16
    plane = tl.program_id(0) % PLANES
    part = tl.program_id(0) // PLANES % SLICES
    e = tl.program_id(0) // (PLANES * SLICES)
    k = plane * BK + tl.arange(0, BK)
    r = tl.arange(0, TR)
    position = tl.load(records + e * 4)
    live = tl.load(records + e * 4 + 1) > 0
    slot = tl.load(records + e * 4 + 2)
    tile = tl.load(records + e * 4 + 3)
    more = False
    if LOOP:
        more = tl.load(records + (e + launched) * 4 + 1, mask=e + launched < last, other=0) > 0
    row = tl.load(order + position, mask=live, other=0).to(tl.int64)
    a, exists = _row_weights(
        pool, sections, ranks, slot, module + part, tile, live, section_slot, rank_slot, k,
        K, TILES, TR, EVEN,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    to = (plane * SLICES + part) * capacity
    if live:
        place = (to + position) * R + tile * 16
        _row_product(a, x, row, planes, place, k, exists, r, x_row, K, EVEN)
    if LOOP:
        while more:
            e += launched
            position = tl.load(records + e * 4)
            slot = tl.load(records + e * 4 + 2)
            tile = tl.load(records + e * 4 + 3)
            then = e + launched
            more = tl.load(records + then * 4 + 1, mask=then < last, other=0) > 0
            row = tl.load(order + position).to(tl.int64)
            a, exists = _row_weights(
                pool, sections, ranks, slot, module + part, tile, True, section_slot, rank_slot, k,
                K, TILES, TR, EVEN,
            )  # fmt: skip
            place = (to + position) * R + tile * 16
            _row_product(a, x, row, planes, place, k, exists, r, x_row, K, EVEN)


@triton.jit(do_not_specialize=["module", "capacity", "launched", "last"])
def shrink_chunks(  # type: ignore[no-untyped-def]
    x, pool, planes, v, locks, sections, ranks, order, records, module, capacity, launched, last,
    x_row, section_slot, rank_slot,
    K: tl.constexpr, SLICES: tl.constexpr, TILES: tl.constexpr, TR: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, BKI: tl.constexpr, BLOCKS: tl.constexpr, STAGES: tl.constexpr,
    REDUCE: tl.constexpr, LOOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCKS programs share a record where records are chunks, one TR of ranks each."""
    PLANES: tl.constexpr = (K + BK - 1) // BK
    plane = tl.program_id(0) % PLANES
    part = tl.program_id(0) // PLANES % SLICES
    block = tl.program_id(0) // (PLANES * SLICES) % BLOCKS
    e = tl.program_id(0) // (PLANES * SLICES * BLOCKS)
    length = tl.load(records + e * 4 + 1)
    while length > 0:
        position = tl.load(records + e * 4)
        slot = tl.load(records + e * 4 + 2)
        tile = tl.load(records + e * 4 + 3) + block * (TR // 16)
        lock = (e * SLICES + part) * BLOCKS + block
        after = 0
        if LOOP:
            e += launched
            after = tl.load(records + e * 4 + 1, mask=e < last, other=0)
        _chunk_product(
            x, pool, v, locks, sections, ranks, order, position, length, slot, tile, lock, module,
            part, plane, capacity, x_row, section_slot, rank_slot, planes,
            K, SLICES, TILES, TR, BM, BK, BKI, STAGES, REDUCE, PDL,
        )  # fmt: skip
        length = after
