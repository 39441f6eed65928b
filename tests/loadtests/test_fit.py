"""Prices fitted to what replicas say, and what is read of that."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.fit import fit
from loadtests.outcome import Outcome
from loadtests.prices import Prices
from loadtests.readings import Reading, by_replica, parse
from replica.core.sequence import Sampling
from replica.core.step import Row, Step
from replica.metrics import Metrics
from shared.messages import Tier


def reading(at: int, steps: float, rows: float, prompt: float, seconds: float) -> Reading:
    return Reading(
        at_s=float(at), replica="r", running=0, waiting=0, steps=steps, step_s=seconds,
        prefill_tokens=prompt, decode_tokens=rows, host_loads=4, host_load_s=0.02,
        disk_loads=2, disk_load_s=0.2,
    )  # fmt: skip


def readings(prices: Prices, windows: list[tuple[int, int, int]]) -> list[Reading]:
    sums = accumulate(windows, lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2]))
    return [reading(0, 0, 0, 0, 0)] + [
        reading(
            at, steps, rows, prompt,
            prices.step_s * steps + prices.row_s * rows + prices.prompt_token_s * prompt,
        )
        for at, (steps, rows, prompt) in enumerate(sums, start=1)
    ]  # fmt: skip


SECONDS = st.floats(1e-5, 0.05)


@given(SECONDS, SECONDS, SECONDS)
def test_prices_that_made_the_readings_are_found_again(
    step_s: float, row_s: float, token_s: float
) -> None:
    prices = Prices(step_s=step_s, row_s=row_s, prompt_token_s=token_s)
    found = fit(readings(prices, [(100, 150, 900), (80, 400, 100), (120, 0, 3000), (90, 90, 90)]))
    assert found.step_s == pytest.approx(step_s, rel=1e-3)
    assert found.row_s == pytest.approx(row_s, rel=1e-3)
    assert found.prompt_token_s == pytest.approx(token_s, rel=1e-3)
    assert found.error < 1e-6
    assert found.host_load_s == pytest.approx(0.005)
    assert found.disk_load_s == pytest.approx(0.095)
    assert replace(Prices(), **found.prices()).disk_load_s == pytest.approx(0.095)


def test_time_between_steps_is_had_from_what_clients_saw() -> None:
    seen = readings(Prices(step_s=0.01, row_s=0, prompt_token_s=0), [(100, 100, 0), (100, 200, 9)])
    rows = [Outcome(n, 0.0, "t", "a", first_s=0.1, completion_tokens=11) for n in range(3)]
    for row in rows:
        row.total_s = 0.1 + 10 * 0.012
    rows.append(Outcome(3, 0.0, "t", "a", total_s=99.0, failure="the stream broke"))
    assert fit(seen, rows).between_s == pytest.approx(0.002)
    assert fit(seen, rows).step_s == pytest.approx(0.012)
    assert fit(seen).between_s == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(0, 900), st.integers(0, 4000), st.floats(0, 5)),
        min_size=1,
        max_size=12,
    )
)
def test_no_price_is_below_zero_whatever_was_read(
    windows: list[tuple[int, int, int, float]],
) -> None:
    sums = list(accumulate(windows, lambda a, b: tuple(map(sum, zip(a, b, strict=True)))))  # type: ignore[arg-type, return-value]
    seen = [reading(0, 0, 0, 0, 0)]
    seen += [reading(at, a, b, c, d) for at, (a, b, c, d) in enumerate(sums, start=1)]
    if not any(window[3] > 0 for window in windows):
        return
    found = fit(seen)
    assert min(found.step_s, found.row_s, found.prompt_token_s) >= 0


def test_nothing_is_fitted_to_replicas_that_rested() -> None:
    with pytest.raises(ValueError, match="no step was seen"):
        fit([reading(0, 5, 5, 5, 1), reading(1, 5, 5, 5, 1)])


def test_a_reading_is_what_the_replica_counts() -> None:
    metrics = Metrics()
    first = parse(metrics.render().decode(), replica="r0", at_s=0)
    assert (first.steps, first.prefill_tokens, first.host_loads) == (0, 0, 0)
    sampling = Sampling(max_tokens=9)
    prompt = Row("a", -1, 0, (1, 2, 3), (0,), True, sampling, 0)
    decode = Row("b", -1, 3, (4,), (1,), True, sampling, 2)
    metrics.step(Step((prompt, decode)), 0.25)
    metrics.loaded(Tier.DISK, 0.5)
    now = parse(metrics.render().decode(), replica="r0", at_s=1)
    assert (now.steps, now.step_s, now.prefill_tokens, now.decode_tokens) == (1, 0.25, 3, 1)
    assert (now.disk_loads, now.disk_load_s, now.host_loads) == (1, 0.5, 0)
    assert now.busy(first) == 0.25
    assert list(by_replica([first, now])) == ["r0"]
