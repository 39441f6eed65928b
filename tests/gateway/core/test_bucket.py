"""The bucket's law: in any window, what is granted is at most burst + rate * window."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.bucket import Denied, Granted, TokenBucket

rates = st.floats(0.001, 1e6)
bursts = st.floats(0.5, 1e7)
gaps = st.floats(0, 100)
steps = st.lists(st.tuples(gaps, st.floats(0, 1.2)), max_size=60)  # (pause, cost / burst)
starts = st.floats(0, 1e7)


@given(rates, bursts, starts, steps)
def test_in_any_window_grants_stay_within_burst_and_refill(
    rate: float, burst: float, start: float, steps: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(rate_per_s=rate, burst=burst, now=start)
    now, granted = start, []
    for pause, share in steps:
        now += pause
        if isinstance(bucket.take(share * burst, now), Granted):
            granted.append((now, share * burst))
        bucket.check()
        assert 0 <= bucket.level(now) <= burst
    sums = list(accumulate((cost for _, cost in granted), initial=0.0))
    for i, (since, _) in enumerate(granted):
        for j, (until, _) in enumerate(granted[i:], start=i):
            bound = burst + rate * (until - since)
            assert sums[j + 1] - sums[i] <= bound * (1 + 1e-9) + 1e-6


@given(rates, bursts, starts, steps, st.floats(0, 1))
def test_retry_after_suffices_if_nobody_else_takes(
    rate: float, burst: float, start: float, steps: list[tuple[float, float]], last: float
) -> None:
    bucket = TokenBucket(rate_per_s=rate, burst=burst, now=start)
    now = start
    for pause, share in [*steps, (0.0, last)]:
        now += pause
        answer = bucket.take(share * burst, now)
        if isinstance(answer, Denied) and share <= 1:
            assert answer.retry_after_s > 0
            now += answer.retry_after_s
            bucket.level(now)  # looking changes nothing
            assert isinstance(bucket.take(share * burst, now), Granted)


@given(bursts, st.floats(0, 1e6))
def test_a_denied_request_takes_nothing(burst: float, more: float) -> None:
    bucket = TokenBucket(rate_per_s=1, burst=burst, now=0)
    bucket.take(burst / 2, 0)
    before = bucket.level(0)
    assert isinstance(bucket.take(burst + more, 0), Denied)
    assert bucket.level(0) == before


@given(rates, st.floats(1, 1e6), st.floats(0, 1e6))
def test_a_clock_that_steps_back_adds_nothing(rate: float, now: float, back: float) -> None:
    bucket = TokenBucket(rate_per_s=rate, burst=100, now=now)
    bucket.take(100, now)
    assert bucket.level(now - back) == 0
    bucket.settle(0, now - back)
    assert bucket.level(now) == 0
    answer = bucket.take(50, now - back)
    assert isinstance(answer, Denied)
    assert isinstance(bucket.take(50, now - back + answer.retry_after_s), Granted)


def test_a_settlement_may_leave_a_debt_that_the_next_request_waits_for() -> None:
    bucket = TokenBucket(rate_per_s=10, burst=100, now=0)
    assert bucket.take(20, 0) == Granted(80)
    bucket.settle(150, 0)
    assert bucket.level(0) == -70
    answer = bucket.take(0, 0)
    assert isinstance(answer, Denied)
    assert answer.retry_after_s == pytest.approx(7)


@given(st.floats(0, 1e9))
def test_a_refund_never_lifts_the_level_above_the_burst(refund: float) -> None:
    bucket = TokenBucket(rate_per_s=10, burst=100, now=0)
    bucket.take(50, 0)
    bucket.settle(-refund, 0)
    bucket.check()
    assert bucket.level(0) == min(100, 50 + refund)


def test_a_cost_above_the_burst_is_denied_for_ever() -> None:
    bucket = TokenBucket(rate_per_s=10, burst=100, now=0)
    assert bucket.take(100.5, 0) == Denied(math.inf)
    assert bucket.take(100, 0) == Granted(0)  # exact at the boundary


def test_a_rate_of_zero_never_refills() -> None:
    bucket = TokenBucket(rate_per_s=0, burst=2, now=0)
    assert [type(bucket.take(1, at)) for at in (0, 1e6, 2e6)] == [Granted, Granted, Denied]
    assert bucket.take(1, 3e6) == Denied(math.inf)


@pytest.mark.parametrize(("rate", "burst"), [(-1, 1), (1, 0), (math.inf, 1), (math.nan, 1)])
def test_a_bucket_without_sense_is_refused(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        TokenBucket(rate_per_s=rate, burst=burst, now=0)


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="settle"):
        TokenBucket(rate_per_s=1, burst=1, now=0).take(-1, 0)
