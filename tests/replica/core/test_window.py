"""A base whose layers all have a window: pages are given back as it moves on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.core.pages import RELEASED, PagePool
from replica.core.sequence import Finish

WINDOW, PAGE, STEP = 8, 2, 4
SPAN = 6  # pages: of 4 tokens and the 7 before them, wherever a page begins


def _windowed(engine_thread: Any, pages: int, **changes: Any) -> Any:
    settings = {"page_tokens": PAGE, "max_step_tokens": STEP, "max_running": 4} | changes
    return engine_thread(pages=pages, window=WINDOW, **settings)


def _prompt(tokens: int, seed: int = 0) -> list[int]:
    return [(seed + at * at) % 89 for at in range(tokens)]


def _said(thread: Any, seq: Any) -> list[int]:
    said: list[int] = thread.text(seq.prompt, None, len(seq.output), WINDOW)
    return said


@given(
    window=st.integers(1, 40), size=st.integers(1, 9), step=st.integers(1, 20),
    start=st.integers(0, 200), ahead=st.integers(1, 60),
)  # fmt: skip
def test_a_step_reads_and_writes_no_page_that_was_passed_and_never_lacks_one(
    window: int, size: int, step: int, start: int, ahead: int
) -> None:
    pool = PagePool(pages=1, page_tokens=size, window=window)
    end = start + ahead
    first = max(0, start + 1 - window)
    assert pool.passed(start) == first // size, "whose last token is before what is seen"
    reach = pool.reach(start, end, step)
    assert min(end, start + step) <= reach <= end
    assert pool.pages_for(reach) - pool.passed(start) <= pool.most_for(end, step)
    assert pool.most_for(end, step) * size < window + step + 2 * size


def test_no_window_is_a_window_of_everything() -> None:
    pool = PagePool(pages=4, page_tokens=2)
    assert (pool.passed(10**9), pool.most_for(99, 1), pool.reach(5, 99, 1)) == (0, 50, 99)
    assert (pool.longest(99, 4, 3), pool.longest(5, 4, 3)) == (6, 5)
    with pytest.raises(ValueError, match="window=0"):
        PagePool(pages=4, page_tokens=2, window=0)


def test_a_prompt_longer_than_the_pool_holds_its_window_and_a_step(engine_thread: Any) -> None:
    thread = _windowed(engine_thread, pages=SPAN)
    seq = thread.add(None, _prompt(300), 100)
    most = 0
    while seq.finish is None:
        step = thread.turn()
        thread.scheduler.check()
        most = max(most, thread.pool.pages - thread.pool.available)
        pages = step.rows[0].pages
        assert pages.count(RELEASED) == thread.pool.passed(step.rows[0].start)
    assert most == SPAN
    assert (len(seq.output), seq.finish, seq.preemptions) == (100, Finish.LENGTH, 0)
    assert seq.output == _said(thread, seq)
    assert thread.pool.available == SPAN


def test_the_longest_sequence_is_the_models_where_the_pool_holds_a_window_and_a_step(
    engine_thread: Any,
) -> None:
    assert _windowed(engine_thread, pages=SPAN).scheduler.max_model_len == 1000
    small = _windowed(engine_thread, pages=SPAN - 1)
    assert small.scheduler.max_model_len == (SPAN - 1) * PAGE
    seq = small.add(None, _prompt(9), 100)
    small.until_all_end()
    assert (len(seq), seq.finish) == (10, Finish.LENGTH)


def test_what_a_sequence_passed_is_there_for_others_until_it_is_wanted(engine_thread: Any) -> None:
    thread = _windowed(engine_thread, pages=60)
    first = thread.add(None, _prompt(60), 4)
    thread.until_all_end()
    early = thread.add(None, [*_prompt(30), 5], 4)
    same = thread.add(None, _prompt(60), 4)
    thread.until_all_end()
    assert [seq.cached for seq in (first, early, same)] == [0, 30, 58]
    for seq in (first, early, same):
        assert seq.output == _said(thread, seq)


def test_a_beginning_is_found_by_its_window_though_what_was_before_is_gone(
    engine_thread: Any,
) -> None:
    thread = _windowed(engine_thread, pages=2 * SPAN)
    text = thread.add(None, _prompt(200), 2)
    thread.until_all_end()
    again = thread.add(None, _prompt(200), 2)
    step = thread.turn()
    assert again.cached == 198
    assert step.rows[0].pages.count(RELEASED) == thread.pool.passed(198)
    thread.until_all_end()
    assert again.output == text.output == _said(thread, text)
    early = thread.add(None, _prompt(100), 2)
    thread.until_all_end()
    assert early.cached == 0, "its window is not there any more"
    assert early.output == _said(thread, early)


def test_n_choices_share_the_window_of_their_prompt(engine_thread: Any) -> None:
    thread = _windowed(engine_thread, pages=40)
    choices = [thread.add(None, _prompt(51), 6) for _ in range(3)]
    while choices[2].admitted_at is None:
        thread.turn()
        thread.scheduler.check()
    assert [seq.cached for seq in choices] == [0, 50, 50]
    held = thread.pool.pages - thread.pool.available
    assert held <= WINDOW // PAGE + 1 + 3, "the window once, and the newest page of each"
    thread.until_all_end()
    assert {tuple(seq.output) for seq in choices} == {tuple(_said(thread, choices[0]))}


def test_whoever_moves_on_from_pages_that_others_hold_finds_room_or_gives_way(
    engine_thread: Any,
) -> None:
    """What it gives back is then no page for it to take, and it needs several at once."""
    preempted = 0
    for pages in range(10, 24):
        thread = _windowed(engine_thread, pages=pages, max_step_tokens=6, max_running=3)
        others = [thread.add(None, [*_prompt(21), at], 30) for at in range(2)]
        longer = thread.add(None, [*_prompt(21), *_prompt(60, seed=7)], 8)
        thread.until_all_end(turns=1000)
        for seq in (*others, longer):
            assert seq.output == _said(thread, seq)
        preempted += sum(seq.preemptions for seq in (*others, longer))
        assert thread.pool.available == pages
    assert preempted > 0


@pytest.mark.parametrize(("pages", "preemptions"), [(10, 0), (9, 1)])
def test_a_preempted_sequence_starts_anew_in_its_window(
    engine_thread: Any, pages: int, preemptions: int
) -> None:
    """Two decode in five pages each, wherever in a page they are."""
    thread = _windowed(engine_thread, pages=pages)
    old, young = (thread.add(None, _prompt(3, seed), 90) for seed in range(2))
    thread.until_all_end()
    assert (old.preemptions, young.preemptions) == (0, preemptions)
    assert (old.output, young.output) == (_said(thread, old), _said(thread, young))


def test_a_prompt_preempted_half_way_is_computed_to_its_end(engine_thread: Any) -> None:
    thread = _windowed(engine_thread, pages=9)
    old, young = thread.add(None, _prompt(3), 100), thread.add(None, _prompt(150), 5)
    while not young.preemptions:
        thread.turn()
    assert not young.output
    thread.until_all_end()
    assert young.output == _said(thread, young)
    assert (old.preemptions, young.preemptions) == (0, 1), "it waits until there is room to stay"


def test_a_driver_that_plans_ahead_names_no_page_that_is_gone(engine_thread: Any) -> None:
    """A chunk is longer than the window: its first pages are passed before it is known."""
    thread = _windowed(engine_thread, pages=40, max_step_tokens=24)
    seq = thread.add(None, _prompt(100), 6)
    while seq.finish is None:
        thread.turn_ahead()
        thread.scheduler.check()
    assert seq.output == _said(thread, seq)
    again = thread.add(None, _prompt(100), 6)
    while again.finish is None:
        thread.turn_ahead()
        thread.scheduler.check()
    assert again.cached == 98
    assert again.output == seq.output


def test_what_a_sequence_that_broke_had_passed_is_found_by_nobody(engine_thread: Any) -> None:
    thread = _windowed(engine_thread, pages=60)
    bad = thread.add(None, _prompt(41))
    while not (step := thread.scheduler.plan(thread.now)).rows[0].samples:
        thread.scheduler.commit(step, thread.run(step), thread.now)
    assert thread.pool.cached > 0
    (end,) = thread.scheduler.commit(step, {}, thread.now)
    assert (end.seq, end.finish, thread.pool.cached) == (bad.id, Finish.ERROR, 0)
    assert thread.pool.available == 60


def test_a_prompt_that_is_scored_is_computed_whole_in_its_window(engine_thread: Any) -> None:
    thread = _windowed(engine_thread, pages=SPAN)
    for _ in range(2):
        seq = thread.add(None, _prompt(50), 2, prompt_logprobs=True)
        targets: list[int] = []
        while seq.finish is None:
            targets += thread.turn().rows[0].targets
        assert targets == _prompt(50)[1:]
        assert seq.output == _said(thread, seq)


def test_adapters_leave_the_longest_sequence_its_window_and_no_more(engine_thread: Any) -> None:
    thread = _windowed(engine_thread, pages=SPAN + 4, adapter_pages_max=4, slots=2)
    thread.offer("a", "b", pages=2)
    for adapter in ("a", "b"):
        thread.add(adapter, [1], 1)
    thread.until_all_end()
    assert thread.cache.pages_used == 4
    seq = thread.add(None, _prompt(200), 50)
    thread.until_all_end()
    assert thread.cache.pages_used == 4, "nobody had to leave"
    assert seq.output == _said(thread, seq)
