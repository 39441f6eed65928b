"""The gathered product in plain torch against its definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixed_adapters import CONFIG, arena_of, by_definition, resident

from replica.core.segments import Segments
from replica.core.step import BASE_SLOT
from replica.engine import kernels
from replica.engine.kernels.reference import ReferencePlan


def _segments(runs: Sequence[tuple[int, int]]) -> Segments:
    starts = [0]
    for _, length in runs:
        starts.append(starts[-1] + length)
    return Segments(tuple(starts), tuple(slot for slot, _ in runs))


RANKS = ([4] * 7, [1, 0, 3, 0, 16, 0, 64], [0, 8, 0, 5, 0, 0, 0], [33, 2, 17, 9, 1, 24, 6])
RUNS = st.lists(st.tuples(st.integers(BASE_SLOT, len(RANKS) - 1), st.integers(1, 20)), min_size=1)


@given(RUNS.map(lambda runs: runs[:5]), st.integers(0, 1), st.integers(0, 3))
def test_the_reference_is_the_definition(
    runs: list[tuple[int, int]], layer: int, index: int
) -> None:
    slots = [resident(seed, ranks, torch.float32) for seed, ranks in enumerate(RANKS)]
    segments, group = _segments(runs), CONFIG.groups[index]
    dice = torch.Generator().manual_seed(segments.starts[-1])
    x = torch.randn(segments.starts[-1], group.in_features, generator=dice)
    y = torch.randn(segments.starts[-1], sum(group.out_features), generator=dice)
    rows = [s for s, n in runs for _ in range(n)]
    expected = by_definition(x, y, layer, index, rows, slots)
    plan = kernels.plan(segments, arena_of(slots, torch.float32, "cpu"))
    if plan is not None:
        plan.add(x, y, layer, index, group)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)


def test_rows_without_adapter_are_not_touched_at_all() -> None:
    slots = [resident(seed, ranks, torch.float32) for seed, ranks in enumerate(RANKS)]
    segments, group = _segments([(BASE_SLOT, 3), (3, 2), (BASE_SLOT, 4)]), CONFIG.groups[0]
    x = torch.randn(9, group.in_features)
    y = torch.randn(9, sum(group.out_features))
    before = y.clone()
    ReferencePlan.of(segments, arena_of(slots, torch.float32, "cpu")).add(x, y, 0, 0, group)
    assert torch.equal(y[:3], before[:3])
    assert torch.equal(y[5:], before[5:])
    assert not torch.equal(y[3:5], before[3:5])


def test_a_step_of_base_rows_has_no_plan() -> None:
    arena = arena_of([resident(0, RANKS[0], torch.float32)], torch.float32, "cpu")
    assert kernels.plan(_segments([(BASE_SLOT, 5)]), arena) is None


def test_an_empty_or_impossible_slot_is_an_error_never_the_base() -> None:
    arena = arena_of([None, resident(0, RANKS[0], torch.float32)], torch.float32, "cpu")
    for slot in (0, 2, -2):
        with pytest.raises(ValueError, match="slot"):
            kernels.plan(_segments([(slot, 1)]), arena)
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="no slot"):
            arena.clear(slot)


def test_an_adapter_over_the_slots_rank_is_not_placed() -> None:
    arena = arena_of([None], torch.float32, "cpu")
    with pytest.raises(ValueError, match="rank 65"):
        arena.place(0, resident(0, [65] * 7, torch.float32).host, [0])


def test_packing_pads_no_rank() -> None:
    host = resident(3, RANKS[3], torch.float32).host
    pairs = resident(3, RANKS[3], torch.float32).pairs.values()
    exact = sum(shrinks.numel() + expands.numel() for shrinks, expands, _ in pairs)
    assert exact <= host.flat.numel() <= exact + 64 * 2 * 2 * 7 * 3  # alignment only
    assert host.rank == 33
