"""The retry budget's law: in its window never more than a share, but for a floor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.retry_budget import RetryBudget

events = st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200)


@given(events, st.sampled_from([0.0, 0.1, 0.2, 1.0]), st.integers(0, 5))
def test_a_grant_keeps_the_window_within_share_and_floor(
    events: list[tuple[float, bool]], share: float, floor: int
) -> None:
    budget = RetryBudget(share=share, floor=floor, window_s=10)
    now, requests, grants = 1000.0, [], []
    for wait_s, retry in events:
        now += wait_s
        if not retry:
            budget.saw(now)
            requests.append(now)
        elif budget.take(now):
            grants.append(now)
            began = (int(now) - 9) * 1.0  # steps of a second: this one and the nine before
            seen = sum(at >= began for at in requests)
            assert sum(at >= began for at in grants) <= max(floor, share * seen)
        budget.check()


def test_a_denied_retry_takes_nothing_and_time_gives_the_floor_back() -> None:
    budget = RetryBudget(share=0, floor=2, window_s=10)
    assert [budget.take(5.0) for _ in range(4)] == [True, True, False, False]
    assert not budget.take(13.9)
    assert budget.take(15.0)
    assert budget.take(15.0)
    assert not budget.take(15.0)


def test_many_requests_earn_retries() -> None:
    budget = RetryBudget(share=0.2, floor=0, window_s=10)
    assert not budget.take(0.0)
    for _ in range(10):
        budget.saw(0.0)
    assert [budget.take(1.0) for _ in range(3)] == [True, True, False]


def test_a_clock_that_steps_back_gives_nothing() -> None:
    budget = RetryBudget(share=0, floor=1, window_s=10)
    assert budget.take(100.0)
    assert not budget.take(3.0)
    budget.check()


@pytest.mark.parametrize("wrong", [{"share": -1}, {"floor": -1}, {"window_s": 0}])
def test_a_budget_that_is_none_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="window_s"):
        RetryBudget(**{"share": 0.2, "floor": 1, "window_s": 10, **wrong})  # type: ignore[arg-type]
