"""Small scenes of the cache: one law each."""

from __future__ import annotations

import pytest

from replica.core.adapter_cache import AdapterCache, Evict, EvictHost, Fetch, Load
from replica.core.pages import PagePool
from shared.ids import AdapterId
from shared.messages import AdapterStatus, Tier

A, B, C, D = (AdapterId(name) for name in "abcd")


def cache_of(*names: AdapterId, slots: int = 2, host_max: int = 4) -> AdapterCache:
    cache = AdapterCache(slots=slots, host_max=host_max, pool=PagePool(pages=8, page_tokens=1))
    for name in names:
        cache.offer(name, "v1", 8, 100, 1)
    return cache


def load(cache: AdapterCache, *names: AdapterId) -> None:
    """Bring them into slots, one after the other, and leave them idle."""
    for name in names:
        assert cache.acquire(name, f"loads-{name}", 0.0) is None
        for command in cache.poll(0.0):
            if isinstance(command, Load):
                cache.read(command.adapter, command.digest)
                cache.loaded(command.adapter, command.digest, command.slot)
        assert cache.acquire(name, f"loads-{name}", 0.0) is not None
        cache.release(f"loads-{name}")


def test_the_least_recently_used_leaves() -> None:
    cache = cache_of(A, B, C)
    load(cache, A, B)
    cache.acquire(A, "s", 1.0)
    cache.release("s")
    cache.want(C, "t", 2.0)
    assert cache.poll(2.0) == [Evict(B, 1), Load(C, "v1", 1, Tier.DISK)]


def test_the_end_of_a_lease_is_a_use() -> None:
    cache = cache_of(A, B, C)
    load(cache, A, B)
    cache.acquire(A, "long", 1.0)
    cache.acquire(B, "short", 2.0)
    cache.release("short")
    cache.release("long")
    cache.want(C, "t", 3.0)
    assert cache.poll(3.0)[0] == Evict(B, 1)


def test_a_held_slot_stays_and_the_wait_is_told() -> None:
    cache = cache_of(A, B, slots=1)
    load(cache, A)
    cache.acquire(A, "s", 1.0)
    assert cache.acquire(B, "t", 2.0) is None
    assert cache.poll(9.0) == []
    assert cache.unplaced == ((B, 2.0),)
    cache.release("s")
    assert cache.poll(9.0) == [Evict(A, 0), Load(B, "v1", 0, Tier.DISK)]
    assert cache.unplaced == ()


def test_a_pinned_adapter_is_loaded_and_stays() -> None:
    cache = cache_of(A, B, C)
    cache.pin(A, True)
    (begun,) = cache.poll(0.0)
    assert begun == Load(A, "v1", 0, Tier.DISK)
    cache.loaded(A, "v1", 0)
    load(cache, B, C, B)
    assert cache.slot_of(A) == 0
    assert cache.drainable() == (1,)
    with pytest.raises(ValueError, match="unpin one first"):
        cache.pin(B, True)
    cache.pin(A, False)
    load(cache, C)
    assert cache.slot_of(A) is None


def test_a_slot_that_an_older_waiter_wants_is_not_given_to_a_younger() -> None:
    cache = cache_of(A, B, C)
    load(cache, A, B)
    cache.acquire(B, "runs", 1.0)
    cache.want(A, "older", 2.0)
    cache.want(C, "younger", 3.0)
    assert cache.poll(3.0) == []
    assert cache.unplaced == ((C, 3.0),)
    cache.release("older")
    assert cache.poll(4.0) == [Evict(A, 0), Load(C, "v1", 0, Tier.DISK)]


def test_a_slot_goes_to_the_oldest_waiter() -> None:
    cache = cache_of(A, B, C, slots=1)
    load(cache, A)
    cache.acquire(A, "runs", 1.0)
    cache.want(C, "older", 2.0)
    cache.want(B, "younger", 3.0)
    cache.release("runs")
    assert cache.poll(4.0) == [Evict(A, 0), Load(C, "v1", 0, Tier.DISK)]
    assert cache.unplaced == ((B, 3.0),)


def test_host_memory_lets_go_of_the_least_recently_used_copy() -> None:
    cache = cache_of(A, B, C, D, slots=1, host_max=2)
    load(cache, A, B, A)
    cache.read(C, "v1")
    assert cache.poll(0.0) == [EvictHost(B, "v1")]
    cache.want(C, "s", 1.0)
    assert cache.poll(1.0) == [Evict(A, 0), Load(C, "v1", 0, Tier.HOST)]


def test_a_copy_that_a_load_reads_from_outlives_its_turn() -> None:
    cache = cache_of(A, B, C, D, slots=2, host_max=2)
    cache.read(A, "v1")
    cache.want(A, "s", 0.0)
    assert cache.poll(0.0) == [Load(A, "v1", 0, Tier.HOST)]
    cache.read(B, "v1")
    cache.read(C, "v1")
    assert cache.poll(0.0) == [EvictHost(B, "v1")], "older than B, yet A is being read"
    cache.want(C, "t", 1.0)
    assert cache.poll(1.0) == [Load(C, "v1", 1, Tier.HOST)]
    cache.read(D, "v1")
    assert cache.poll(1.0) == [EvictHost(D, "v1")], "all are busy: the newcomer goes"


def test_a_copy_that_returns_before_it_was_let_go_of_stays() -> None:
    cache = cache_of(A, B, slots=1, host_max=1)
    cache.read(A, "v1")
    cache.read(B, "v1")
    cache.read(A, "v1")
    assert cache.poll(0.0) == [EvictHost(B, "v1")]
    assert [state.tier for state in cache.states()] == [Tier.HOST, Tier.DISK]


def test_a_load_that_fails_fails_the_adapter_until_other_content_comes() -> None:
    cache = cache_of(A)
    cache.want(A, "s", 0.0)
    cache.poll(0.0)
    cache.load_failed(A, "v1", 0, "short read")
    assert cache.poll(1.0) == [Evict(A, 0)]
    (state,) = cache.states()
    assert (state.status, state.reason) == (AdapterStatus.FAILED, "short read")
    cache.offer(A, "v1", 8, 100, 1)
    assert cache.poll(2.0) == [], "the same broken content is not read again"
    cache.offer(A, "v2", 8, 100, 1)
    assert cache.poll(3.0) == [Load(A, "v2", 0, Tier.DISK)]


def test_the_failure_of_an_old_version_does_not_touch_the_new_one() -> None:
    cache = cache_of(A)
    cache.want(A, "s", 0.0)
    cache.poll(0.0)
    cache.offer(A, "v2", 8, 100, 1)
    cache.load_failed(A, "v1", 0, "torn while it was replaced")
    assert cache.refusal(A) is None
    assert cache.poll(1.0) == [Evict(A, 0), Load(A, "v2", 0, Tier.DISK)]


def test_a_load_under_way_ends_once_though_its_adapter_was_withdrawn() -> None:
    cache = cache_of(A)
    cache.want(A, "s", 0.0)
    cache.poll(0.0)
    cache.withdraw(A)
    assert (cache.states(), cache.slots_used) == ((), 1)
    cache.read(A, "v1")
    cache.loaded(A, "v1", 0)
    assert cache.poll(1.0) == [Evict(A, 0), EvictHost(A, "v1")]
    assert cache.slots_used == 0
    with pytest.raises(ValueError, match="is not receiving"):
        cache.loaded(A, "v1", 0)


def test_an_unload_frees_slot_and_host_copy_at_once_when_nobody_holds_them() -> None:
    cache = cache_of(A)
    load(cache, A)
    assert (cache.slots_used, cache.host_used) == (1, 1)
    cache.withdraw(A)
    assert cache.poll(1.0) == [Evict(A, 0), EvictHost(A, "v1")]
    assert (cache.slots_used, cache.host_used) == (0, 0)


def test_old_and_new_version_live_side_by_side_until_the_old_is_let_go() -> None:
    cache = cache_of(A)
    load(cache, A)
    assert cache.acquire(A, "old", 1.0) == 0
    cache.offer(A, "v2", 8, 100, 1)
    assert cache.acquire(A, "new", 2.0) is None
    assert cache.acquire(A, "old", 2.0) == 0, "its lease stands"
    assert cache.poll(2.0) == [EvictHost(A, "v1"), Load(A, "v2", 1, Tier.DISK)]
    cache.loaded(A, "v2", 1)
    assert cache.acquire(A, "new", 3.0) == 1
    assert (cache.digest_in(0), cache.digest_in(1)) == ("v1", "v2")
    cache.release("old")
    assert cache.poll(3.0) == [Evict(A, 0)]


def test_a_cache_that_cannot_keep_its_laws_is_not_built() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        AdapterCache(slots=0, host_max=4, pool=PagePool(pages=1, page_tokens=1))
    with pytest.raises(ValueError, match="raise max_cpu_loras"):
        AdapterCache(slots=4, host_max=3, pool=PagePool(pages=1, page_tokens=1))
    with pytest.raises(ValueError, match="digest"):
        cache_of().offer(A, "", 8, 100, 1)


def test_what_is_far_away_gives_its_slot_back_and_blocks_nobody() -> None:
    cache = cache_of(A, B, C, slots=1)
    cache.want(A, "s", 1.0)
    assert cache.poll(1.0) == [Load(A, "v1", 0, Tier.DISK)]
    cache.postpone(A, "v1", 0)
    cache.want(B, "t", 2.0)
    assert cache.poll(2.0) == [Evict(A, 0), Fetch(A, "v1"), Load(B, "v1", 0, Tier.DISK)]
    assert cache.unplaced == ()
    cache.want(A, "u", 3.0)
    assert cache.poll(3.0) == [], "it is asked for once"
    cache.read(B, "v1")
    cache.loaded(B, "v1", 0)
    cache.check()
    cache.read(A, "v1", 5.0)
    assert cache.poll(4.0) == [Evict(B, 0), Load(A, "v1", 0, Tier.HOST)]
    cache.check()


def test_a_fetch_that_fails_is_told_to_all_who_wait() -> None:
    cache = cache_of(A, slots=1)
    cache.want(A, "s", 1.0)
    cache.poll(1.0)
    cache.postpone(A, "v1", 0)
    cache.poll(1.0)
    cache.fetch_failed(A, "v1", "the store is down")
    assert "the store is down" in (cache.refusal(A) or "")
    assert cache.poll(2.0) == []
    cache.check()


def test_a_version_replaced_while_it_is_fetched_is_let_go_when_it_comes() -> None:
    cache = cache_of(A, slots=1)
    cache.want(A, "s", 1.0)
    cache.poll(1.0)
    cache.postpone(A, "v1", 0)
    cache.poll(1.0)
    cache.offer(A, "v2", 8, 100, 1)
    assert cache.poll(2.0) == [Load(A, "v2", 0, Tier.DISK)]
    cache.read(A, "v1")
    assert cache.poll(3.0) == [EvictHost(A, "v1")]
    cache.check()


def test_a_load_waits_for_bytes_of_host_memory_that_others_are_read_into() -> None:
    pool = PagePool(pages=8, page_tokens=1)
    cache = AdapterCache(slots=2, host_bytes=150, pool=pool)
    for name, digest in ((A, "a1"), (B, "b1"), (C, "c1")):
        cache.offer(name, digest, 8, 100, 1)
    cache.offer(D, "d1", 8, 151, 1)
    assert "host_bytes" in (cache.refusal(D) or "")
    cache.want(A, "s", 1.0)
    cache.want(B, "t", 2.0)
    assert cache.poll(2.0) == [Load(A, "a1", 0, Tier.DISK)]
    cache.read(A, "a1")
    cache.loaded(A, "a1", 0)
    assert cache.poll(3.0) == [EvictHost(A, "a1"), Load(B, "b1", 1, Tier.DISK)]
    assert cache.host_bytes == 100
    cache.check()
