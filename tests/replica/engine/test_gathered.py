"""The Triton kernels against the definition: every form, mixed ranks, any mix of rows.

Without a GPU they run in Triton's interpreter, which must be chosen before triton is imported; so
they run in a process of their own (test_gathered_interpreted.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_adapters import CONFIG, Resident, arena_of, by_definition, resident
from torch import Tensor

from replica.core.segments import Segments
from replica.core.step import BASE_SLOT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if ON_GPU else "cpu"

if INTERPRETED or ON_GPU:
    from replica.engine.kernels.gathered import GatheredLora, TritonPlan
    from replica.engine.kernels.metadata import GatheredMeta
    from replica.engine.kernels.tiling import Expand, Shrink, Tiling

    BY_ROW = Tiling(Shrink(True, 64, 16), Expand(True, 64, 16))
    TWO_TILES = Tiling(Shrink(True, 128, 16), Expand(True, 128, 32))
    BY_CHUNK = Tiling(Shrink(False, 32, 16, 16), Expand(False, 64, BN=32))
    WHOLE = Tiling(Shrink(False, 64, 64, 32), Expand(True, 128, 16))
    REDUCED = Tiling(Shrink(False, 32, 64, 16, reduce=True), Expand(False, 32, BN=16))
    FORMS = {"rows": BY_ROW, "two tiles": TWO_TILES, "chunks": BY_CHUNK, "both": WHOLE}
    FORMS["reduced"] = REDUCED

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not ON_GPU, reason="runs in its own process")
] + ([pytest.mark.gpu] if ON_GPU else [])

RANKS = ([4] * 7, [1, 0, 3, 0, 16, 0, 64], [0, 8, 0, 5, 0, 0, 0], [33, 2, 17, 9, 1, 24, 6])
BATCHES = {
    "one row": [3],
    "a chunk and one more": [3] * 17,
    "all slots and none, apart": [BASE_SLOT, 1, 0, 3, 2, 1, BASE_SLOT, 3],
}
GROUPS = range(4) if ON_GPU else (0, 3)  # three slices; one, whose K is no multiple of a plane
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # the interpreter's bfloat16 dot is wrong
TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}


def _residents(dtype: torch.dtype = torch.float32) -> list[Resident]:
    return [resident(seed, ranks, dtype) for seed, ranks in enumerate(RANKS)]


def _lora(residents: list[Resident], dtype: torch.dtype, max_rank: int = 64) -> GatheredLora:
    arena = arena_of(residents, dtype, DEVICE, max_rank)
    return GatheredLora(arena, CONFIG.groups, max_rank)


def _rows(slots: Sequence[int]) -> Tensor:
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def _inputs(rows: int, index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    group, dice = CONFIG.groups[index], torch.Generator().manual_seed(rows)
    x = torch.randn(rows, group.in_features, generator=dice)
    y = torch.randn(rows, sum(group.out_features), generator=dice)
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


def _check(lora: GatheredLora, meta: GatheredMeta, slots: Sequence[int], cut: Tiling) -> None:
    residents = _residents()
    for index in GROUPS:
        x, y = _inputs(len(slots), index, DTYPE)
        before = y.clone()
        lora.add(x, y, 1, index, meta, cut)
        expected = by_definition(x.cpu(), before.cpu(), 1, index, slots, residents)
        torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=TOLERANCE[DTYPE])
        base = [row for row, slot in enumerate(slots) if slot == BASE_SLOT]
        assert torch.equal(y[base], before[base])


@pytest.mark.parametrize(
    ("form", "batch"),
    [
        *(("rows", "one row"), ("chunks", "one row")),
        *(("chunks", "a chunk and one more"), ("reduced", "a chunk and one more")),
        *((form, "all slots and none, apart") for form in ("rows", "two tiles", "chunks")),
        *((form, "all slots and none, apart") for form in ("both", "reduced")),
    ],
)
def test_every_form_equals_the_definition(batch: str, form: str) -> None:
    slots, lora = BATCHES[batch], _lora(_residents(DTYPE), DTYPE)
    meta = lora.meta(len(slots))
    meta.update(_rows(slots))
    _check(lora, meta, slots, FORMS[form])


def test_what_a_table_or_the_default_chooses_equals_the_definition() -> None:
    slots, lora = [3, BASE_SLOT, 1], _lora(_residents(DTYPE), DTYPE)
    for shared in (False, True):
        meta = lora.meta(len(slots), shared=shared)
        meta.update(_rows(slots))
        for index in GROUPS:
            x, y = _inputs(len(slots), index, DTYPE)
            expected = by_definition(x.cpu(), y.cpu(), 0, index, slots, _residents())
            lora.add(x, y, 0, index, meta)
            torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=TOLERANCE[DTYPE])


@pytest.mark.parametrize("form", ["rows", "chunks", "reduced"])
def test_a_step_of_more_chunks_than_programs_takes_them_in_turns(form: str) -> None:
    slots, lora = [0, 1, 2, 3, 0], _lora(_residents(DTYPE), DTYPE)
    meta = replace(lora.meta(len(slots)), launched=2, block=1)
    meta.update(_rows(slots))
    _check(lora, meta, slots, FORMS[form])


def test_ranks_up_to_256_go_through_as_they_are() -> None:
    ranks = [[256, 0, 130, 8, 0, 0, 0], [0, 1, 0, 100, 0, 0, 0]]
    residents = [resident(seed, each, DTYPE) for seed, each in enumerate(ranks)]
    lora = _lora(residents, DTYPE, max_rank=256)
    slots = [0, 1, BASE_SLOT]
    meta = lora.meta(len(slots))
    meta.update(_rows(slots))
    dots = Tiling(Shrink(False, 64, 64, 64), Expand(False, 64, BN=32))
    for cut in (BY_ROW, dots):
        for index in (0, 1):
            x, y = _inputs(len(slots), index, DTYPE)
            plain = [resident(seed, each, torch.float32) for seed, each in enumerate(ranks)]
            expected = by_definition(x.cpu(), y.cpu(), 0, index, slots, plain)
            lora.add(x, y, 0, index, meta, cut)
            tolerance = TOLERANCE[DTYPE] * 4
            torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=tolerance)


def test_a_half_precision_pool_is_multiplied_in_float32() -> None:
    slots, dtype = BATCHES["all slots and none, apart"], torch.float16
    lora = _lora(_residents(dtype), dtype)
    meta = lora.meta(len(slots))
    meta.update(_rows(slots))
    for cut in (BY_ROW, BY_CHUNK):
        x, y = _inputs(len(slots), 0, dtype)
        expected = by_definition(x.cpu(), y.cpu(), 1, 0, slots, _residents())
        lora.add(x, y, 1, 0, meta, cut)
        torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["rows", "chunks"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(form: str) -> None:
    lora = _lora(_residents(DTYPE), DTYPE)
    crowd, cut = [3, 1, 3, 0, BASE_SLOT, 3], FORMS[form]
    x, y = _inputs(len(crowd), 0, DTYPE)
    alone = y.clone()
    meta = lora.meta(len(crowd))
    meta.update(_rows(crowd))
    lora.add(x, y, 1, 0, meta, cut)
    for row in (2, 3):
        one = lora.meta(1)
        one.update(_rows([crowd[row]]))
        lora.add(x[row : row + 1], alone[row : row + 1], 1, 0, one, cut)
        assert torch.equal(y[row], alone[row])


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40), st.integers(1, 5))
@settings(max_examples=12, deadline=None)
def test_the_lists_are_every_row_with_an_adapter_once(slots: list[int], block: int) -> None:
    widths = [1, 3, 2, 1, 2]  # tiles by slot
    ranks = torch.tensor([[[16 * w, 1]] for w in widths], dtype=torch.int32, device=DEVICE)
    meta = GatheredMeta.empty(len(slots), ranks, 3, block=block, shared=False, launched=1)
    for earlier in ([0] * len(slots), slots):  # what an update leaves must not reach the next
        meta.update(_rows(earlier))
    order = sorted(range(len(slots)), key=lambda row: (slots[row] < 0, slots[row], row))
    assert meta.order.tolist() == order
    runs = [(slot, len(list(run))) for slot, run in groupby(slots[row] for row in order)]
    for size, lists in ((1, (meta.singles, meta.single_tiles)),
                        (block, (meta.chunks, meta.chunk_tiles))):  # fmt: skip
        expected, position = [], 0
        for slot, count in runs:
            if slot >= 0:
                expected += [
                    [position + at, min(size, count - at), slot] for at in range(0, count, size)
                ]
            position += count
        tiles = [[*record, t] for record in expected for t in range(widths[record[2]])]
        for found, wanted in zip(lists, ([[*r, 0] for r in expected], tiles), strict=True):
            assert found.tolist()[: len(wanted)] == wanted
            assert all(record[1] == 0 for record in found.tolist()[len(wanted) :])


def test_a_plan_of_segments_refuses_an_empty_slot() -> None:
    arena = arena_of([None, resident(0, RANKS[0], DTYPE)], DTYPE, DEVICE)
    with pytest.raises(ValueError, match="slot 0 is empty"):
        TritonPlan.of(Segments((0, 2), (0,)), arena)
    x, y = _inputs(5, 1, DTYPE)
    expected = by_definition(
        x.cpu(), y.cpu(), 0, 1, [0] * 5, [resident(0, RANKS[0], torch.float32)]
    )
    TritonPlan.of(Segments((0, 5), (1,)), arena).add(x, y, 0, 1, CONFIG.groups[1])
    torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=TOLERANCE[DTYPE])


@pytest.mark.skipif(not ON_GPU, reason="graphs are a GPU's")
def test_one_captured_graph_serves_any_mix() -> None:
    lora, rows = _lora(_residents(DTYPE), DTYPE), 10
    held, meta = _rows([BASE_SLOT] * rows), lora.meta(rows)
    x, y = _inputs(rows, 0, DTYPE)
    result = torch.empty_like(y)

    def step() -> None:
        meta.update(held)
        result.copy_(y)  # stands for the base's product, an ordinary launch
        lora.add(x, result, 1, 0, meta)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for slots in ([0] * rows, [3, 2, 1, 0, -1] * 2, [-1] * rows):
        held.copy_(_rows(slots))
        graph.replay()
        expected = by_definition(x.cpu(), y.cpu(), 1, 0, slots, _residents())
        torch.testing.assert_close(result.double().cpu(), expected, rtol=0, atol=TOLERANCE[DTYPE])
