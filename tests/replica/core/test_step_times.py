"""What a step takes, learned from steps, and what follows for prompts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.core.step_times import HALF, LEAST, OUTLIER, StepTimes

COSTS = st.tuples(st.floats(1e-3, 1.0), st.floats(1e-6, 1e-2))


def _learned(costs: tuple[float, float], prompts: list[int], ratio: float = 3.0) -> StepTimes:
    base, token = costs
    times = StepTimes(ratio=ratio)
    for tokens in prompts:
        times.observe(tokens, base + token * tokens)
    return times


@given(COSTS, st.lists(st.sampled_from((0, 0, 100, 700, 4000)), min_size=4, max_size=60))
def test_steps_on_a_line_give_the_line(costs: tuple[float, float], prompts: list[int]) -> None:
    times = _learned(costs, [0, 300, *prompts])
    assert times.base_s == pytest.approx(costs[0], rel=1e-3)
    assert times.token_s == pytest.approx(costs[1], rel=1e-3)


@given(COSTS, st.floats(1.1, 9))
def test_a_step_of_the_budget_takes_the_ratio_of_a_step_without(
    costs: tuple[float, float], ratio: float
) -> None:
    base, token = costs
    budget = _learned(costs, [0, 500, 0, 90], ratio).budget
    assert budget is not None
    assert budget >= LEAST
    if budget > LEAST:
        assert base + token * budget <= ratio * base * 1.001
        assert base + token * (budget + 1) >= ratio * base * 0.999


def test_nothing_is_limited_before_both_kinds_are_known() -> None:
    for prompts in ([], [500], [0] * 40, [500] * 40):
        assert _learned((0.01, 1e-5), prompts).budget is None
    times = _learned((0.01, 1e-5), [0, 500])
    assert times.limit(8192, decode=False, now=0.0) == 8192, "nobody decodes"
    assert times.limit(8192, decode=True, now=0.0) == times.budget
    assert times.limit(7, decode=True, now=0.0) == 7


def test_what_changes_is_learned_again() -> None:
    times = _learned((0.01, 1e-5), [0, 500] * HALF)
    for tokens in [0, 500] * 3 * HALF:
        times.observe(tokens, 0.02 + 3e-5 * tokens)
    assert times.base_s == pytest.approx(0.02, rel=0.1)
    assert times.token_s == pytest.approx(3e-5, rel=0.1)


def test_a_step_that_took_for_ever_does_not_count_for_ever() -> None:
    times = _learned((0.01, 1e-5), [0, 500] * HALF)
    once = times.base_s
    times.observe(0, 30.0)
    assert times.base_s < once * (1 + 2 * OUTLIER / HALF)
    for tokens in [0, 500] * HALF:
        times.observe(tokens, 0.01 + 1e-5 * tokens)
    assert times.base_s == pytest.approx(once, rel=0.15)


def test_a_step_under_way_begins_when_the_one_before_has_ended(engine_thread: Any) -> None:
    thread = engine_thread()
    thread.add(None, [1] * 30, 5)
    scheduler, now = thread.scheduler, 0.0
    steps = []
    for _ in range(3):
        steps.append(scheduler.plan(now))
        scheduler.advance(steps[-1])
    for took, step in zip((2.0, 0.5, 0.5), steps, strict=True):
        now += took
        drawn = {row.seq: 1 for row in step.rows if row.samples}
        scheduler.settle(step, drawn, now)
    times = scheduler.times
    assert times.base_s == pytest.approx(0.5)
    assert times.expected_s(steps[0]) == pytest.approx(2.0)


def test_prompts_lengthen_steps_while_somebody_decodes_and_only_then(engine_thread: Any) -> None:
    thread = engine_thread(pages=400, max_model_len=600, max_step_tokens=200)

    def turn() -> int:
        """A step of 100 ms and a millisecond a token of prompts; how many of these it had."""
        step = thread.scheduler.plan(thread.now)
        thread.now += 0.1 + 0.001 * step.prompt_tokens
        thread.scheduler.commit(step, thread.run(step), thread.now)
        return int(step.prompt_tokens)

    first = thread.add(None, [1] * 300, 60)
    assert [turn(), turn(), turn(), turn()] == [200, 100, 0, 0]
    second = thread.add(None, [2] * 500, 3)
    chunks = [turn() for _ in range(4)]
    assert all(abs(chunk - 200) <= 2 for chunk in chunks[:2]), chunks
    assert sum(chunks) == 500
    assert len(first.output) > 6
    assert len(second.output) > 0
