"""Prompts that begin alike are computed once."""

from __future__ import annotations

from typing import Any

from replica.core.sequence import Finish
from shared.ids import AdapterId

PROMPT = list(range(10))  # pages of 4: two are full, and the last token is in the third


def _rows(step: Any) -> dict[str, int]:
    return {row.seq: len(row.tokens) for row in step.rows}


def test_n_choices_of_one_prompt_compute_it_once_and_each_its_last_page(
    engine_thread: Any,
) -> None:
    thread = engine_thread()
    first, *others = (thread.add(None, PROMPT) for _ in range(4))
    assert _rows(thread.turn()) == {first.id: 10}
    assert _rows(thread.turn()) == {first.id: 1, **{seq.id: 2 for seq in others}}
    assert [seq.cached for seq in (first, *others)] == [0, 8, 8, 8]
    held = thread.pool.pages - thread.pool.available
    assert held == 2 + 4, "two pages for all, and one for each"
    thread.until_all_end()
    assert {tuple(seq.output) for seq in thread.sequences.values()} == {tuple(first.output)}


def test_who_waits_for_a_prompt_takes_it_over_when_its_leader_goes(engine_thread: Any) -> None:
    thread = engine_thread(max_step_tokens=8, max_running=8)
    leader = thread.add(None, range(30))
    thread.turn()
    follower = thread.add(None, range(30))
    thread.turn()
    assert follower.admitted_at is None
    thread.scheduler.abort(leader.id, now=thread.now)
    assert _rows(thread.turn()) == {follower.id: 8}
    assert follower.cached == 16, "what the leader had computed is not lost"
    thread.until_all_end()
    assert follower.output == thread.text(range(30), None, 4)


def test_another_prompt_passes_who_waits_for_one(engine_thread: Any) -> None:
    thread = engine_thread()
    thread.offer("a")
    thread.add(None, PROMPT)
    thread.add(None, PROMPT)
    thread.add("a", PROMPT, 1)
    assert len(thread.turn().rows) == 2, "the same tokens under other weights are another prompt"


def test_new_weights_under_an_old_name_find_nothing_of_the_old(engine_thread: Any) -> None:
    thread = engine_thread()
    thread.offer("a")
    thread.add("a", PROMPT)
    thread.until_all_end()
    thread.offer("a", digest="v2")
    new = thread.add("a", PROMPT)
    base = thread.add(None, PROMPT)
    thread.until_all_end()
    assert (new.cached, base.cached) == (0, 0)
    assert new.output == thread.text(PROMPT, (AdapterId("a"), "v2"), 4)
    thread.offer("a", digest="v1")
    back = thread.add("a", PROMPT)
    thread.until_all_end()
    assert back.cached == 8, "a rollback finds what the old version left"
    assert back.output == thread.text(PROMPT, (AdapterId("a"), "v1"), 4)


def test_a_salt_divides_and_only_divides(engine_thread: Any) -> None:
    thread = engine_thread()
    found = []
    for salt in ("", "acme", "globex", "", "acme"):
        found.append(thread.add(None, PROMPT, salt=salt))
        thread.until_all_end()
    assert [seq.cached for seq in found] == [0, 0, 0, 8, 8]


def test_the_last_token_is_always_computed(engine_thread: Any) -> None:
    thread = engine_thread()
    for prompt in (range(8), range(8), range(9), range(9)):
        thread.add(None, prompt, 1)
        thread.until_all_end()
    assert [seq.cached for seq in thread.sequences.values()] == [0, 4, 8, 8]


def test_pages_of_a_sequence_that_broke_are_found_by_nobody(engine_thread: Any) -> None:
    thread = engine_thread()
    bad = thread.add(None, PROMPT)
    thread.turn()
    step = thread.scheduler.plan(thread.now)
    (end,) = thread.scheduler.commit(step, {}, thread.now)
    assert (end.seq, end.finish) == (bad.id, Finish.ERROR)
    assert thread.pool.cached == 0
    again = thread.add(None, PROMPT)
    thread.until_all_end()
    assert again.cached == 0
    assert again.output == thread.text(PROMPT, None, 4)


def test_a_preempted_sequence_takes_up_what_is_still_cached(engine_thread: Any) -> None:
    thread = engine_thread(pages=9, page_tokens=2)
    thread.add(None, [1, 2, 3], 10)
    young = thread.add(None, [4, 5, 6, 7], 8)
    while not young.preemptions:
        thread.turn()
    computed = thread.pool.cached
    thread.until_all_end()
    assert computed > 0
    assert young.cached == 0, "that is said of its first start"
    assert young.output == thread.text([4, 5, 6, 7], None, 8)


def test_cached_pages_leave_before_idle_adapters_and_these_before_running_sequences(
    engine_thread: Any,
) -> None:
    thread = engine_thread(pages=12, max_model_len=32, adapter_pages_max=4, slots=2)
    thread.offer("a", "b", pages=2)
    for adapter in ("a", "b"):
        thread.add(adapter, [1], 1)
    thread.add(None, range(9), 1)
    thread.until_all_end()
    assert (thread.pool.cached, thread.cache.pages_used) == (2, 4)
    sequences = [thread.add(None, [7], 31), thread.add(None, [8], 31)]
    stages = []
    while not sequences[1].preemptions:
        thread.turn()
        stage = (thread.pool.cached, thread.cache.pages_used, sequences[1].preemptions)
        if stage not in stages:
            stages.append(stage)
    assert stages == [(2, 4, 0), (0, 4, 0), (0, 2, 0), (0, 0, 0), (5, 0, 1)]
    thread.until_all_end()


def test_a_start_takes_idle_adapters_and_never_its_own(engine_thread: Any) -> None:
    thread = engine_thread(pages=8, max_model_len=16, adapter_pages_max=4, slots=2)
    thread.offer("a", "b", pages=2)
    for adapter in ("a", "b"):
        thread.add(adapter, [1], 1)
    thread.until_all_end()
    thread.add(None, range(12), 4)
    asks = thread.add("a", [1, 2], 4)
    thread.turn()
    assert asks.admitted_at == thread.now
    assert thread.cache.pages_used == 2
    thread.until_all_end()
