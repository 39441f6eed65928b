"""The census: one that is heard is never dropped, and each other case of who belongs."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.census import Census, Join, Leave, Life, Move
from shared.ids import ReplicaId

A, B, C = (ReplicaId(f"replica-{n}") for n in range(3))


def census(**more: float) -> Census[str]:
    rules = {"members_max": 8, "forget_s": 10.0, **more}
    return Census(
        order=("file", "dns"),
        members_max=int(rules["members_max"]),
        forget_s=rules["forget_s"],
    )


def settle(
    it: Census[str], now: float, life: Mapping[ReplicaId, Life] | None = None
) -> list[Join[str] | Move[str] | Leave]:
    changes = it.settle(lambda replica: (life or {}).get(replica, Life.SILENT), now)
    it.check()
    return changes


def test_who_is_named_joins_once_and_the_first_source_counts() -> None:
    it = census()
    it.told("dns", {A: "from dns", B: "b"})
    it.told("file", {A: "from the file"})
    assert settle(it, 0) == [Join(A, "from the file"), Join(B, "b")]
    assert settle(it, 1) == []
    assert (it.holder(A), it.holder(B), it.holder(C)) == ("file", "dns", None)


def test_one_that_reports_stays_whatever_the_sources_say() -> None:
    it = census()
    it.told("dns", {A: "a"})
    settle(it, 0)
    it.told("dns", {})
    assert settle(it, 1, {A: Life.HEARD}) == []
    assert settle(it, 1000, {A: Life.HEARD}) == []
    assert A in it.members


def test_one_that_drained_leaves_at_once_and_one_that_vanished_after_its_time() -> None:
    it = census()
    it.told("dns", {A: "a", B: "b"})
    settle(it, 0)
    it.told("dns", {})
    assert settle(it, 1, {A: Life.DRAINED, B: Life.SILENT}) == [Leave(A)]
    assert settle(it, 5, {B: Life.HEARD}) == []  # it spoke: its time begins anew
    assert settle(it, 6) == []
    assert settle(it, 15.9) == []
    assert settle(it, 16) == [Leave(B)]


def test_one_that_is_named_stays_though_it_is_silent() -> None:
    it = census()
    it.told("dns", {A: "a"})
    settle(it, 0)
    assert settle(it, 10_000) == []
    assert settle(it, 20_000, {A: Life.DRAINED}) == []


def test_a_new_address_is_followed_when_the_old_one_is_silent() -> None:
    it = census()
    it.told("dns", {A: "old"})
    settle(it, 0)
    it.told("dns", {A: "new"})
    assert settle(it, 1, {A: Life.HEARD}) == []
    assert settle(it, 2) == [Move(A, "new")]
    assert it.members[A] == "new"


def test_a_full_fleet_takes_in_the_next_when_one_has_left() -> None:
    it = census(members_max=2)
    it.told("dns", {A: "a", B: "b", C: "c"})
    assert settle(it, 0) == [Join(A, "a"), Join(B, "b")]
    assert it.crowded == {C}
    it.told("dns", {B: "b", C: "c"})
    assert settle(it, 1, {A: Life.DRAINED}) == [Leave(A), Join(C, "c")]
    assert not it.crowded


ENTRIES = st.dictionaries(st.sampled_from([A, B, C]), st.sampled_from("xyz"), max_size=3)
LIVES = st.dictionaries(st.sampled_from([A, B, C]), st.sampled_from(Life), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(["file", "dns"]), ENTRIES, LIVES), max_size=30))
def test_changes_add_up_to_the_members_and_none_drops_who_is_heard(
    told: list[tuple[str, dict[ReplicaId, str], dict[ReplicaId, Life]]],
) -> None:
    it, mine = census(members_max=2), dict[ReplicaId, str]()
    for now, (source, entries, life) in enumerate(told):
        it.told(source, entries)
        for change in settle(it, 4.0 * now, life):
            if isinstance(change, Leave):
                assert life.get(change.replica, Life.SILENT) is not Life.HEARD
                del mine[change.replica]
                continue
            assert isinstance(change, Join) == (change.replica not in mine)
            assert isinstance(change, Join) or life.get(change.replica) is not Life.HEARD
            mine[change.replica] = change.entry
        assert mine == it.members
