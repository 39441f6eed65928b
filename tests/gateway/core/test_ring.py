"""The ring's law: a replica that leaves is deleted from every order, one that joins is inserted."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ring import REACH, AdapterRing
from shared.ids import AdapterId, ReplicaId

# Names that were built to be confused with each other's points, and any others.
tricky = st.from_regex(r"\A[a1#-]{1,6}\Z")
names = st.lists(st.one_of(tricky, st.text(min_size=1, max_size=12)), unique=True, max_size=8)
adapters = st.lists(st.text(max_size=12).map(AdapterId), min_size=1, max_size=12)


def ring_of(replicas: list[str], vnodes: int = 8) -> AdapterRing:
    ring = AdapterRing(vnodes=vnodes)
    for replica in replicas:
        ring.add(ReplicaId(replica))
    return ring


@given(names, adapters, st.text(min_size=1, max_size=12))
def test_joining_inserts_and_leaving_deletes(
    replicas: list[str], adapters: list[AdapterId], other: str
) -> None:
    replicas = [name for name in replicas if name != other]
    ring = ring_of(replicas)
    before = {adapter: ring.order(adapter) for adapter in adapters}
    ring.add(ReplicaId(other))
    ring.check()
    for adapter in adapters:
        assert tuple(r for r in ring.order(adapter) if r != other) == before[adapter]
        assert other in ring.order(adapter)
    ring.remove(ReplicaId(other))
    ring.check()
    assert {adapter: ring.order(adapter) for adapter in adapters} == before


@given(names, st.integers(1, 40))
def test_no_two_names_share_a_point(replicas: list[str], vnodes: int) -> None:
    ring = ring_of(replicas, vnodes)
    assert ring.points == vnodes * len(replicas)


def test_replica_1_and_replica_11_share_no_point() -> None:
    ring = ring_of(["replica-1", "replica-11", "replica-1-1", "replica-", "replica"], vnodes=200)
    assert ring.points == 5 * 200
    ring.check()


@given(names, adapters)
def test_the_order_does_not_depend_on_the_order_of_joining(
    replicas: list[str], adapters: list[AdapterId]
) -> None:
    one, other = ring_of(replicas), ring_of(replicas[::-1])
    assert [one.order(a) for a in adapters] == [other.order(a) for a in adapters]


@given(names, adapters, st.integers(1, 99))
def test_a_walk_is_the_beginning_of_the_order_remembered_or_not(
    replicas: list[str], adapters: list[AdapterId], more: int
) -> None:
    ring = ring_of([*replicas, *(f"more-{n}" for n in range(more))], vnodes=2)
    for adapter in adapters:
        assert next(iter(ring.walk(adapter))) == ring.order(adapter)[0]
        for _ in range(2):
            assert tuple(ring.walk(adapter)) == ring.order(adapter)[:REACH]
    ring.check()


def test_every_process_draws_the_same_circle() -> None:
    ring = ring_of([f"replica-{i}" for i in range(4)], vnodes=64)
    orders = {name: [r[-1] for r in ring.order(AdapterId(name))] for name in ("legal", "sql", "")}
    assert orders == {
        "legal": ["0", "2", "3", "1"],
        "sql": ["2", "0", "1", "3"],
        "": ["2", "3", "0", "1"],
    }


def test_homes_are_spread() -> None:
    ring = ring_of([f"replica-{i}" for i in range(6)], vnodes=64)
    homes = Counter(ring.order(AdapterId(f"adapter-{i}"))[0] for i in range(3000))
    assert max(homes.values()) < 1.5 * 3000 / 6


def test_what_is_remembered_is_bounded() -> None:
    ring = AdapterRing(vnodes=4, remembered_max=10)
    ring.add(ReplicaId("replica-0"))
    for i in range(100):
        ring.order(AdapterId(f"adapter-{i}"))
        ring.check()


def test_an_empty_ring_has_an_empty_order() -> None:
    ring = AdapterRing(vnodes=4)
    assert ring.order(AdapterId("sql")) == tuple(ring.walk(AdapterId("sql"))) == ()
    ring.remove(ReplicaId("nobody"))
    ring.add(ReplicaId("replica-0"))
    ring.add(ReplicaId("replica-0"))
    assert ring.order(AdapterId("sql")) == ("replica-0",)
