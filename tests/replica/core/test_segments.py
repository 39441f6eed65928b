from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from replica.core.segments import Segments, segments
from replica.core.sequence import Sampling
from replica.core.step import Row, Step

LAYOUTS = st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 5)), max_size=12)


def step_of(layout: list[tuple[int, int]]) -> Step:
    sampling = Sampling(max_tokens=1)
    return Step(
        tuple(
            Row(f"s{i}", slot, 0, (0,) * tokens, (0,), True, sampling, 0)
            for i, (slot, tokens) in enumerate(layout)
        )
    )


@given(LAYOUTS)
def test_segments_are_every_token_once_under_its_own_slot(layout: list[tuple[int, int]]) -> None:
    step = step_of(layout)
    laid = segments(step)
    assert (laid.starts[0], laid.starts[-1]) == (0, step.total_tokens)
    by_token = [
        slot
        for (start, end), slot in zip(pairwise(laid.starts), laid.slots, strict=True)
        for _ in range(start, end)
    ]
    assert by_token == [row.slot for row in step.rows for _ in row.tokens]


@given(LAYOUTS)
def test_neighbouring_segments_have_different_slots(layout: list[tuple[int, int]]) -> None:
    laid = segments(step_of(layout))
    assert list(laid.slots) == [slot for slot, _ in groupby(slot for slot, _ in layout)]


def test_a_step_without_adapters_says_so() -> None:
    assert segments(step_of([(-1, 3), (-1, 1)])).base_only
    assert not segments(step_of([(-1, 3), (0, 1)])).base_only
    assert segments(step_of([])) == Segments(starts=(0,), slots=())
