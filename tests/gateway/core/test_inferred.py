"""Inferred residency against two LRU caches, one in the other, as an engine keeps them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.inferred import Inferred
from shared.messages import Tier

NAMES = "abcdef"
names = st.sampled_from(NAMES)


class TwoCaches:
    """Each request touches both; each evicts its own least recent."""

    def __init__(self, slots: int, host_slots: int) -> None:
        self.sizes = (slots, host_slots)
        self.caches: tuple[list[str], list[str]] = ([], [])

    def used(self, name: str) -> None:
        for cache, size in zip(self.caches, self.sizes, strict=True):
            if name in cache:
                cache.remove(name)
            cache.append(name)
            del cache[:-size]

    def tier(self, name: str) -> Tier:
        gpu, host = self.caches
        return Tier.GPU if name in gpu else Tier.HOST if name in host else Tier.DISK


@given(st.lists(names), st.integers(1, 4), st.integers(0, 4))
def test_what_was_used_is_where_two_lru_caches_have_it(
    uses: list[str], slots: int, more: int
) -> None:
    engine, inferred = TwoCaches(slots, slots + more), Inferred()
    for name in uses:
        engine.used(name)
        inferred.used(name)
    tiers = inferred.tiers(NAMES, (), slots=slots, host_slots=slots + more)
    assert {name: tiers[name] for name in uses} == {name: engine.tier(name) for name in uses}


@given(st.lists(names), st.sets(names, max_size=3), st.integers(3, 5))
def test_what_runs_is_in_a_slot_and_what_nobody_used_is_not(
    uses: list[str], at_work: set[str], slots: int
) -> None:
    inferred = Inferred()
    for name in uses:
        inferred.used(name)
    tiers = inferred.tiers(NAMES, at_work, slots=slots, host_slots=0)
    in_slots = {name for name, tier in tiers.items() if tier is Tier.GPU}
    assert at_work <= in_slots <= {*uses, *at_work}
    assert len(in_slots) <= slots
    assert Tier.DISK not in tiers.values(), "it holds all that it was given"


@given(st.lists(names, min_size=1))
def test_nothing_outlives_a_restart_or_its_place_in_the_list(uses: list[str]) -> None:
    inferred = Inferred()
    for name in uses:
        inferred.used(name)
    inferred.keep({"a"})
    assert inferred.tiers("bc", (), slots=2, host_slots=2) == {"b": Tier.HOST, "c": Tier.HOST}
    inferred.used("b")
    inferred.clear()
    assert inferred.tiers("b", (), slots=2, host_slots=0) == {"b": Tier.HOST}


def test_without_a_number_of_slots_each_counts_as_loaded() -> None:
    assert Inferred().tiers("ab", (), slots=0, host_slots=0) == {"a": Tier.GPU, "b": Tier.GPU}
