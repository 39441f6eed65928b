"""What a reader should be able to see at a glance: one law, one small scene."""

from __future__ import annotations

from typing import Any

import pytest

from replica.core.scheduler import Scheduler
from replica.core.sequence import Finish, Sequence
from shared.ids import AdapterId

A = AdapterId("a")


def test_one_step_mixes_several_adapters_and_none(engine_thread: Any) -> None:
    thread = engine_thread(slots=2)
    thread.offer("a", "b")
    for adapter in ("a", None, "b", None, "a"):
        thread.add(adapter)
    step = thread.turn()
    assert [row.slot for row in step.rows] == [-1, -1, 0, 0, 1]


def test_decoding_comes_before_prefilling_and_prompts_fill_the_rest_in_chunks(
    engine_thread: Any,
) -> None:
    thread = engine_thread(max_running=4, max_step_tokens=6)
    thread.add(None, [1, 2], 9)
    thread.turn()
    long = thread.add(None, range(12), 9)
    late = thread.add(None, [7], 9)
    chunks = [(row.seq, len(row.tokens), row.samples) for row in thread.turn().rows]
    assert chunks == [("s0", 1, True), (long.id, 5, False)]
    chunks = [(row.seq, len(row.tokens), row.samples) for row in thread.turn().rows]
    assert chunks == [("s0", 1, True), (long.id, 5, False)]
    chunks = [(row.seq, len(row.tokens), row.samples) for row in thread.turn().rows]
    assert chunks == [("s0", 1, True), (long.id, 2, True), (late.id, 1, True)]


def test_the_base_never_waits_for_a_load(engine_thread: Any) -> None:
    thread = engine_thread(slots=1)
    thread.offer("a")
    waiter = thread.add("a")
    base = thread.add(None, [1], 3)
    for _ in range(3):
        thread.turn(loads=False)
    assert base.finish is Finish.LENGTH
    assert waiter.admitted_at is None
    assert thread.scheduler.waiting_adapters() == ("a",)
    assert thread.scheduler.next_wakeup(thread.now) is None, "only the end of the load helps"
    thread.end_load()
    assert thread.scheduler.next_wakeup(thread.now) == thread.now


@pytest.mark.parametrize(
    ("wishes", "eos", "tokens", "drawn", "finish"),
    [
        ({}, True, 4, 1, Finish.STOP),
        ({}, True, 1, 1, Finish.STOP),
        ({}, False, 4, 4, Finish.LENGTH),
        ({"ignore_eos": True}, True, 4, 4, Finish.LENGTH),
        ({"stop_token_ids": True}, False, 4, 1, Finish.STOP),
        ({"stop_token_ids": True, "ignore_eos": True}, True, 4, 1, Finish.STOP),
    ],
)
def test_a_sequence_ends_at_a_stop_token_or_at_its_length(
    engine_thread: Any, wishes: dict[str, Any], eos: bool, tokens: int, drawn: int, finish: Finish
) -> None:
    first = frozenset(engine_thread.text([1, 2, 3], None, 1))
    thread = engine_thread(eos_ids=first if eos else frozenset())
    if "stop_token_ids" in wishes:
        wishes = {**wishes, "stop_token_ids": first}
    seq = thread.add(None, [1, 2, 3], tokens, **wishes)
    thread.until_all_end()
    assert (len(seq.output), seq.finish) == (drawn, finish)
    assert seq.ended_at == thread.now


def test_a_sequence_ends_where_the_model_or_the_pool_does(engine_thread: Any) -> None:
    thread = engine_thread(max_model_len=8)
    seq = thread.add(None, [1, 2, 3], 100)
    thread.until_all_end()
    assert (len(seq), seq.finish) == (8, Finish.LENGTH)
    small = engine_thread(pages=3, page_tokens=4)
    assert small.scheduler.max_model_len == 12
    seq = small.add(None, [1, 2, 3], 100)
    small.until_all_end()
    assert (len(seq), seq.finish) == (12, Finish.LENGTH)


def test_what_can_never_run_is_refused_and_leaves_nothing(engine_thread: Any) -> None:
    thread = engine_thread(pages=3, page_tokens=4)
    with pytest.raises(ValueError, match="shorten the prompt to at most 11 tokens"):
        thread.add(None, range(12))
    seq = thread.add()
    with pytest.raises(ValueError, match="give each an id of its own"):
        thread.scheduler.add(seq, 0.0)
    assert thread.scheduler.waiting == 1
    with pytest.raises(ValueError, match=r"raise max_step_tokens \(4\) to max_running \(8\)"):
        engine_thread(max_running=8, max_step_tokens=4)


def test_a_preempted_sequence_finishes_on_the_version_it_began_with(engine_thread: Any) -> None:
    thread = engine_thread(pages=8, page_tokens=2, slots=1)
    thread.offer("a")
    thread.add(None, [1, 2, 3], 12)
    old = thread.add("a", [4, 5, 6], 12)
    thread.turn()
    while not old.preemptions:
        thread.turn()
    assert old.output, "it had spoken before"
    thread.offer("a", digest="v2")
    new = thread.add("a", [4, 5, 6], 12)
    thread.until_all_end()
    assert old.output == thread.text([4, 5, 6], (A, "v1"), 12)
    assert new.output == thread.text([4, 5, 6], (A, "v2"), 12)
    assert (old.digest, new.digest) == ("v1", "v2")


@pytest.mark.parametrize("how", ["unknown", "withdrawn", "refused", "load failed"])
def test_who_waits_for_an_adapter_that_is_lost_ends_with_the_reason(
    engine_thread: Any, how: str
) -> None:
    thread = engine_thread()
    if how != "unknown":
        thread.offer("a")
    seq = thread.add("a")
    if how == "load failed":
        thread.turn(loads=False)
        thread.end_load(fails=True)
    elif how == "withdrawn":
        thread.cache.withdraw(A)
    elif how == "refused":
        thread.cache.failed(A, "rank 512 is over the cap of 64")
    assert thread.scheduler.next_wakeup(thread.now) == thread.now
    assert thread.turn() is None
    (end,) = thread.ends
    reasons = {"refused": "rank 512 is over the cap of 64", "load failed": "the disk is on fire"}
    assert (end.seq, end.token, end.finish) == (seq.id, None, Finish.ERROR)
    assert reasons.get(how, "not, or no longer, in this replica's store") in end.reason
    assert thread.scheduler.waiting == 0
    thread.scheduler.check()


def test_who_runs_on_an_adapter_that_is_withdrawn_finishes(engine_thread: Any) -> None:
    thread = engine_thread()
    thread.offer("a")
    seq = thread.add("a", [1], 5)
    thread.turn()
    thread.cache.withdraw(A)
    thread.until_all_end()
    assert seq.output == thread.text([1], (A, "v1"), 5)
    assert thread.cache.slots_used == 0


def test_a_row_without_a_token_ends_that_sequence_alone(engine_thread: Any) -> None:
    thread = engine_thread()
    bad, good = thread.add(), thread.add()
    step = thread.scheduler.plan(1.0)
    drawn = thread.run(step)
    del drawn[bad.id]
    ends = [(p.seq, p.finish) for p in thread.scheduler.commit(step, drawn, 1.0)]
    assert ends == [(bad.id, Finish.ERROR), (good.id, None)]
    thread.scheduler.check()


def test_a_step_is_committed_once_and_only_the_last_one(engine_thread: Any) -> None:
    thread = engine_thread()
    thread.add()
    first, second = thread.scheduler.plan(1.0), thread.scheduler.plan(1.0)
    assert first == second, "a step that was lost is planned again"
    with pytest.raises(ValueError, match="the last plan"):
        thread.scheduler.commit(first, {"s0": 1}, 1.0)
    thread.scheduler.commit(second, {"s0": 1}, 1.0)
    with pytest.raises(ValueError, match="once"):
        thread.scheduler.commit(second, {"s0": 1}, 1.0)


def test_an_id_that_returns_while_its_old_step_runs_gets_nothing_of_it(engine_thread: Any) -> None:
    thread = engine_thread()
    seq = thread.add()
    step = thread.scheduler.plan(1.0)
    thread.scheduler.abort(seq.id, now=1.0)
    again = Sequence(seq.id, None, (7, 8), seq.sampling, 1.0)
    thread.scheduler.add(again, 1.0)
    assert thread.scheduler.commit(step, thread.run(step), 1.0) == []
    thread.sequences[seq.id] = again
    thread.until_all_end()
    assert again.output == thread.text((7, 8), None, 4)


def test_a_waiter_that_leaves_takes_its_wish_with_it(engine_thread: Any) -> None:
    thread = engine_thread(slots=1)
    thread.offer("a")
    seq = thread.add("a")
    assert thread.scheduler.abort(seq.id, Finish.ERROR, 2.0)
    assert not thread.scheduler.abort(seq.id, Finish.ERROR, 3.0)
    assert (seq.finish, seq.ended_at) == (Finish.ERROR, 2.0)
    assert thread.cache.poll(3.0) == []


def test_an_idle_adapter_that_an_older_sequence_waits_for_is_kept(engine_thread: Any) -> None:
    """One place to run, two slots: the load for the third must not push out the second."""
    thread = engine_thread(slots=2, max_running=1, max_step_tokens=8)
    thread.offer("a", "b", "c")
    for adapter in ("a", "b", "c"):
        thread.add(adapter, [1], 5)
    thread.until_all_end()
    assert [seq.finish for seq in thread.sequences.values()] == [Finish.LENGTH] * 3
    assert thread.now < 3 * 5 + 3, "b was loaded twice"


def test_only_rows_with_penalties_carry_what_was_drawn(engine_thread: Any) -> None:
    thread = engine_thread()
    plain, penal = thread.add(), thread.add(presence_penalty=0.5)
    thread.turn()
    rows = {row.seq: row for row in thread.turn().rows}
    assert rows[plain.id].output == ()
    assert rows[penal.id].output == tuple(penal.output[:1])
    assert rows[penal.id].drawn == 1


def test_an_idle_scheduler_sleeps(engine_thread: Any) -> None:
    scheduler: Scheduler = engine_thread().scheduler
    assert scheduler.plan(1.0) is None
    assert scheduler.next_wakeup(1.0) is None
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_what_is_computed_past_an_end_is_void_and_its_neighbours_go_on(engine_thread: Any) -> None:
    alone = engine_thread.text((1, 2, 3), None, 8)
    stop = alone[2]
    thread = engine_thread(max_running=4)
    ends = thread.add(tokens=8, stop_token_ids=frozenset({stop}))
    other = thread.add(prompt=(4, 5), tokens=8)
    planned = []
    while thread.scheduler.running + thread.scheduler.waiting:
        step = thread.turn_ahead()
        planned.append(set() if step is None else {row.seq for row in step.rows})
    thread.land()
    drawn = alone.index(stop) + 1
    assert ends.finish is Finish.STOP
    assert ends.output == alone[:drawn]
    assert [ends.id in rows for rows in planned[: drawn + 2]] == [True] * (drawn + 1) + [False]
    assert other.output == engine_thread.text((4, 5), None, 8)


def test_a_draw_that_depends_on_the_token_before_waits_for_it(engine_thread: Any) -> None:
    thread = engine_thread(max_running=4)
    steered, free = thread.add(tokens=4, presence_penalty=1.0), thread.add(tokens=4)
    rows = []
    while thread.scheduler.running + thread.scheduler.waiting:
        step = thread.turn_ahead()
        rows.append([] if step is None else sorted(row.seq for row in step.rows))
    assert rows[:4] == [[steered.id, free.id], [free.id], [steered.id, free.id], [free.id]]
    assert len(steered.output) == len(free.output) == 4
