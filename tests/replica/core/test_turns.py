"""An adapter without a slot gets its turn, however hot the others are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.core.adapter_cache import AdapterCache, Load
from replica.core.pages import PagePool
from replica.core.turns import Turns
from shared.ids import AdapterId

WAIT_S = 5.0


def flooded(engine_thread: Any, *, slots: int, wait_s: float = WAIT_S, tokens: int = 6) -> Any:
    """Each turn of `flood` adds one sequence for every hot adapter; they fill all slots."""
    thread = engine_thread(
        slots=slots, pages=2000, max_running=64, max_step_tokens=256, adapter_wait_s=wait_s
    )
    hot = [f"hot-{i}" for i in range(slots)]
    thread.offer(*hot, "cold", "cool", "chilly")

    def flood(*, base: bool = False) -> None:
        for name in hot:
            thread.add(name, [1, 2], tokens)
        if base:
            thread.add(None, [1], 1)
        thread.turn()

    for _ in range(3):
        flood()
    return thread, flood


@given(slots=st.integers(1, 4), tokens=st.integers(2, 20))
def test_the_wait_is_bounded_by_wait_s_and_the_longest_that_holds_a_slot(
    engine_thread: Any, slots: int, tokens: int
) -> None:
    thread, flood = flooded(engine_thread, slots=slots, tokens=tokens)
    cold = thread.add("cold")
    while cold.admitted_at is None:
        flood()
        turns_to_notice_and_load = 4
        assert thread.now - cold.arrived_at <= WAIT_S + tokens + turns_to_notice_and_load
    thread.scheduler.check()


def test_without_turns_the_flood_would_starve_it(engine_thread: Any) -> None:
    thread, flood = flooded(engine_thread, slots=2, wait_s=1e9)
    cold = thread.add("cold")
    for _ in range(100):
        flood()
    assert cold.admitted_at is None


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_several_starved_adapters_all_get_their_turn_the_oldest_first(
    engine_thread: Any, slots: int
) -> None:
    thread, flood = flooded(engine_thread, slots=slots)
    starved = []
    for name in ("cool", "chilly", "cold"):
        starved.append(thread.add(name))
        flood()
    for _ in range(100):
        flood()
    started = [seq.admitted_at for seq in starved]
    assert None not in started
    assert started == sorted(started)
    assert started[0] - starved[0].arrived_at <= WAIT_S + 6 + 4


def test_the_hot_adapter_comes_back_after_the_turn(engine_thread: Any) -> None:
    thread, flood = flooded(engine_thread, slots=1)
    thread.add("cold")
    for _ in range(60):
        flood()
    late = thread.sequences[max(thread.sequences, key=lambda seq: int(seq[1:]))]
    assert late.adapter == "hot-0"
    thread.until_all_end()
    assert late.output == thread.text(late.prompt, (AdapterId("hot-0"), "v1"), 6)


def test_while_a_slot_drains_the_base_and_the_other_slots_go_on(engine_thread: Any) -> None:
    thread, flood = flooded(engine_thread, slots=2, tokens=30)
    cold = thread.add("cold")
    while cold.admitted_at is None:
        before = thread.scheduler.running
        new = len(thread.sequences)
        flood(base=True)
        hot_0, hot_1, base = list(thread.sequences.values())[new:]
        if before < 50:
            assert base.admitted_at == thread.now, "the base waited"
            assert thread.now in (hot_0.admitted_at, hot_1.admitted_at), "both slots were closed"


def test_a_pinned_adapter_is_never_drained(engine_thread: Any) -> None:
    thread, flood = flooded(engine_thread, slots=2)
    thread.cache.pin(AdapterId("hot-0"), True)
    cold = thread.add("cold")
    while cold.admitted_at is None:
        flood()
        assert thread.cache.slot_of(AdapterId("hot-0")) is not None
        assert all(s.admitted_at for s in thread.sequences.values() if s.adapter == "hot-0")


def test_a_waiter_that_leaves_opens_the_slot_again(engine_thread: Any) -> None:
    thread, flood = flooded(engine_thread, slots=1, tokens=30)
    cold = thread.add("cold")
    for _ in range(8):
        flood()
    held_back = thread.scheduler.waiting
    assert held_back > 1
    thread.scheduler.abort(cold.id, now=thread.now)
    flood()
    assert thread.scheduler.waiting == 0
    assert thread.cache.unplaced == ()


def test_the_slot_expected_free_first_drains_and_the_choice_stands() -> None:
    cache = AdapterCache(slots=2, host_max=2, pool=PagePool(pages=1, page_tokens=1))
    for name in ("a", "b", "c"):
        cache.offer(AdapterId(name), "v1", 8, 100, 0)
    for seq in ("a", "b"):
        cache.want(AdapterId(seq), seq, 0.0)
    for load in cache.poll(0.0):
        assert isinstance(load, Load)
        cache.loaded(load.adapter, load.digest, load.slot)
        assert cache.acquire(load.adapter, load.adapter, 0.0) == load.slot
    cache.want(AdapterId("c"), "c", 1.0)
    cache.poll(1.0)
    turns = Turns(wait_s=WAIT_S)
    turns.update(cache, lambda: {0: 7, 1: 5}, 1.0 + WAIT_S)
    assert not turns.closed(1, 2.0), "not yet"
    turns.update(cache, lambda: {0: 7, 1: 5}, 1.1 + WAIT_S)
    assert [turns.closed(slot, 2.0) for slot in (0, 1, -1)] == [False, True, False]
    assert not turns.closed(1, 1.0), "who came before the waiter may still start"
    turns.update(cache, lambda: {0: 1, 1: 4}, 2.0 + WAIT_S)
    assert [turns.closed(slot, 2.0) for slot in (0, 1)] == [False, True]


@given(pages=st.integers(2, 6), tokens=st.integers(2, 20))
def test_pages_that_others_always_take_go_to_an_adapter_in_its_turn(
    engine_thread: Any, pages: int, tokens: int
) -> None:
    """The base's flood fills the pool, and an adapter needs several pages at once."""
    thread = engine_thread(
        pages=16, max_model_len=40, adapter_pages_max=6, max_step_tokens=256, adapter_wait_s=WAIT_S
    )
    thread.offer("cold", pages=pages)

    def flood() -> None:
        for _ in range(3):
            thread.add(None, [len(thread.sequences)], tokens)
        thread.turn()

    for _ in range(20):
        flood()
    before = list(thread.sequences.values())
    cold = thread.add("cold", [1])
    while cold.admitted_at is None and thread.cache.slots_used == 0:
        flood()
    for late in thread.sequences.values():
        if late.arrived_at > cold.arrived_at and late.admitted_at not in (None, thread.now):
            assert late.admitted_at <= cold.arrived_at + WAIT_S + 1, "it slipped in"
    turns = sum(seq.ended_at is None or seq.ended_at > cold.arrived_at for seq in before) * tokens
    assert thread.now - cold.arrived_at <= WAIT_S + turns + 4
    thread.scheduler.check()


@pytest.mark.parametrize("small", [1, 2, 3])
def test_as_many_slots_drain_as_free_the_pages_that_are_needed(
    engine_thread: Any, small: int
) -> None:
    """Hot adapters hold all that adapters may have; the cold one is as large as `small` of them."""
    thread = engine_thread(
        slots=3, pages=200, max_model_len=400, adapter_pages_max=6, max_running=64,
        max_step_tokens=256, adapter_wait_s=WAIT_S,
    )  # fmt: skip
    hot = ["hot-0", "hot-1", "hot-2"]
    thread.offer(*hot, pages=2)
    thread.offer("cold", pages=2 * small)
    for _ in range(4):
        for name in hot:
            thread.add(name, [1], 6)
        thread.turn()
    cold = thread.add("cold")
    while cold.admitted_at is None:
        base = thread.add(None, [2], 1)
        for name in hot:
            thread.add(name, [1], 6)
        thread.turn()
        assert base.finish is not None, "the pool has pages: the base goes on"
        assert thread.now - cold.arrived_at <= WAIT_S + 6 + 4
    left = [name for name in hot if thread.cache.slot_of(AdapterId(name)) is not None]
    assert len(left) == 3 - small, "and no more"


def test_adapters_that_no_slot_can_drain_for_hold_nobody_back(engine_thread: Any) -> None:
    """Three starve, two slots drain. The third would lack pages too, but first it lacks a slot."""
    thread = engine_thread(
        slots=2, pages=24, max_model_len=40, adapter_pages_max=8, max_running=16,
        max_step_tokens=64, adapter_wait_s=WAIT_S,
    )  # fmt: skip
    thread.offer("hot-0", "hot-1", "cold", "cool", "chilly", pages=4)
    for name in ("hot-0", "hot-1"):
        thread.add(name, [1], 30)
    thread.turn()
    thread.turn()
    for name in ("cold", "cool", "chilly"):
        thread.add(name, [1], 30)
    for _ in range(20):
        base = thread.add(None, [len(thread.sequences)], 1)
        thread.turn()
        assert base.finish is not None, "the base waits for no adapter"
    assert len(thread.cache.unplaced) == 3
