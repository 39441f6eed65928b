"""Which replica holds which adapter version in which tier, from the replicas' own reports.

A report is a whole snapshot, so applying one replaces all that was known of its replica. Reports of
one life of a process (`boot`) are ordered by `seq`; an older or repeated one changes nothing. A new
boot starts over, and a boot that has been replaced never speaks again. However reports are lost,
repeated or reordered, the map ends in the newest one.

The map is kept both ways: replica -> its adapters, and adapter -> {replica: state} (READY and
LOADING only: a FAILED adapter is not routable). The second is what the router reads, and equals a
rebuild from the first. A lost replica holds nothing, but its adapters' names are remembered until
it reports again or is removed: to forget them would turn a restart into `404 no such model`.

A thousand replicas on one store need not each name its hundred thousand adapters. A report may name
the store, and then only what is nearer than the store's disk, or FAILED; `listing` says once what
the store has. Such an adapter's holders are then a view: who names it, and everybody on the store.
`near` is the part of them that a router looks at one by one: those that have it nearer than disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gateway.core.shelf import Held, Holdings, Shelf
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

ANY = AdapterId("*")
"""Reported by a replica that takes every name: it holds each adapter that nobody names."""

_NOBODY: Mapping[ReplicaId, AdapterState] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Change:
    """What one event did to the routable adapters of a replica."""

    gained: frozenset[AdapterId] = frozenset()  # now served there, of another version, or nearer
    gone: frozenset[AdapterId] = frozenset()  # no longer served there


class ResidencyMap:
    def __init__(self) -> None:
        self._of: dict[ReplicaId, Holdings] = {}
        self._holders: dict[AdapterId, dict[ReplicaId, AdapterState]] = {}
        self._near: dict[AdapterId, dict[ReplicaId, AdapterState]] = {}
        self._shelves: dict[str, Shelf] = {}
        self._shelf_of: dict[AdapterId, Shelf] = {}

    def listing(self, store: str, states: Iterable[AdapterState]) -> Change:
        """What the store has now; each state as it is on disk. Its replicas name it in reports."""
        shelf = self._shelves.setdefault(store, Shelf())
        before, shelf.listing = shelf.listing, {state.adapter: state for state in states}
        for adapter in before.keys() - shelf.listing.keys():
            del self._shelf_of[adapter]
        for adapter in shelf.listing:
            self._shelf_of[adapter] = shelf
        gained = shelf.listing.keys() - before.keys()
        return Change(frozenset(gained), frozenset(before.keys() - shelf.listing.keys()))

    def apply(self, report: ReplicaReport, now: float) -> Change | None:
        """None when the report is stale or a repetition: nothing changed."""
        mine = self._of.setdefault(report.replica, Holdings())
        if report.boot in mine.retired or (report.boot == mine.boot and report.seq <= mine.seq):
            return None
        if report.boot != mine.boot and mine.seq >= 0:
            mine.retired.append(mine.boot)
            mine.loading_since.clear()
        mine.boot, mine.seq = report.boot, report.seq
        mine.reported, mine.remembered = report.adapters, frozenset()
        mine.remembered_store = ""
        self._shelve(report.replica, mine, report.store)
        return self._replace(report.replica, mine, report.adapters, now)

    def lose(self, replica: ReplicaId) -> Change:
        """It holds nothing until its next report, which still must be newer than its last."""
        mine = self._of.get(replica)
        if mine is None:
            return Change()
        mine.remembered |= mine.routable.keys()
        mine.remembered_store = mine.remembered_store or mine.store
        mine.reported = ()
        self._shelve(replica, mine, "")
        return self._replace(replica, mine, (), 0.0)

    def forget(self, replica: ReplicaId) -> Change:
        """It left the fleet: nothing of it is remembered, its boots neither."""
        change = self.lose(replica)
        self._of.pop(replica, None)
        return change

    def holders(self, adapter: AdapterId) -> Mapping[ReplicaId, AdapterState]:
        """Replicas that serve the adapter, whatever the tier. A live view: do not keep it."""
        held = self._holders.get(adapter)
        if self._shelf_of and (shelf := self._shelf_of.get(adapter)) is not None:
            return Held(adapter, held or _NOBODY, shelf)
        return self._holders.get(ANY, _NOBODY) if held is None else held

    def near(self, adapter: AdapterId) -> Mapping[ReplicaId, AdapterState]:
        """Those of its holders that have it in a slot, in host memory, or on its way there."""
        return self._near.get(adapter, _NOBODY)

    def near_of(self, replica: ReplicaId) -> dict[AdapterId, AdapterState]:
        """What a replica has nearer than disk."""
        mine = self._of.get(replica)
        held = {} if mine is None else mine.routable
        return {adapter: state for adapter, state in held.items() if _is_near(state)}

    def names(self) -> list[AdapterId]:
        """Every adapter that somebody serves, by name; not ANY."""
        return sorted((self._holders.keys() | self._shelf_of.keys()) - {ANY})

    def size_bytes(self, adapter: AdapterId) -> int:
        """As its store says, or the first that has it; 0 when nobody does."""
        shelf = self._shelf_of.get(adapter)
        if shelf is not None:
            return shelf.listing[adapter].size_bytes
        held = self._holders.get(adapter, _NOBODY).values()
        return next((state.size_bytes for state in held), 0)

    def loading_since(self, replica: ReplicaId, adapter: AdapterId) -> float | None:
        """When the load that is under way was first reported."""
        return self._of[replica].loading_since.get(adapter)

    def of(self, replica: ReplicaId) -> tuple[AdapterState, ...]:
        """All it reported, FAILED adapters included; empty while it is lost."""
        mine = self._of.get(replica)
        return mine.reported if mine is not None else ()

    def boot(self, replica: ReplicaId) -> str:
        mine = self._of.get(replica)
        return mine.boot if mine is not None else ""

    def knows(self, adapter: AdapterId) -> bool:
        """Some replica serves it, or did when it was lost."""
        if self.holders(adapter):
            return True
        listed = {store for store, shelf in self._shelves.items() if adapter in shelf.listing}
        return any(
            adapter in mine.remembered or ANY in mine.remembered or mine.remembered_store in listed
            for mine in self._of.values()
        )

    def adapters(self) -> dict[AdapterId, str]:
        """Every served adapter with its version: the one most replicas have, then the least."""
        served = {
            adapter: state.digest
            for shelf in self._shelves.values()
            if shelf.members
            for adapter, state in shelf.listing.items()
        }
        for adapter, held in self._holders.items():
            if adapter != ANY and adapter not in served:
                served[adapter] = _version(held.values())
        return served

    def check(self) -> None:
        rebuilt: dict[AdapterId, dict[ReplicaId, AdapterState]] = {}
        for replica, mine in self._of.items():
            assert not (mine.remembered and mine.routable), f"{replica} is lost and holds"
            assert mine.boot not in mine.retired, f"{replica} is back in a replaced boot"
            loading = {a for a, s in mine.routable.items() if s.status is AdapterStatus.LOADING}
            assert mine.loading_since.keys() == loading, f"{replica}: loads out of step"
            for adapter, state in mine.routable.items():
                rebuilt.setdefault(adapter, {})[replica] = state
            assert mine.failed.isdisjoint(mine.routable)
        assert rebuilt == self._holders, "the inverse index is not the inverse"
        near = {a: {r: s for r, s in held.items() if _is_near(s)} for a, held in rebuilt.items()}
        assert self._near == {a: held for a, held in near.items() if held}, "near is out of step"
        for store, shelf in self._shelves.items():
            assert shelf.members == {r: m for r, m in self._of.items() if m.store == store}

    def _shelve(self, replica: ReplicaId, mine: Holdings, store: str) -> None:
        if store != mine.store:
            if mine.store:
                del self._shelves[mine.store].members[replica]
            if store:
                self._shelves.setdefault(store, Shelf()).members[replica] = mine
            mine.store = store

    def _replace(
        self, replica: ReplicaId, mine: Holdings, states: Iterable[AdapterState], now: float
    ) -> Change:
        before, after = mine.routable, {}
        gained, failed = [], []
        for state in states:
            adapter = state.adapter
            if state.status is AdapterStatus.FAILED:
                failed.append(adapter)
                continue
            after[adapter] = state
            was = before.get(adapter)
            if was is not state:
                self._holders.setdefault(adapter, {})[replica] = state
                self._note_near(adapter, replica, state)
                if was is None or _nearer(state, was):
                    gained.append(adapter)
        gone = before.keys() - after.keys()
        for adapter in gone:
            held = self._holders[adapter]
            del held[replica]
            if not held:
                del self._holders[adapter]
            self._note_near(adapter, replica, None)
        mine.failed = frozenset(failed)
        if mine.store:
            listing = self._shelves[mine.store].listing
            gone = {name for name in gone if name not in listing or name in mine.failed}
        mine.routable = after
        mine.loading_since = {
            adapter: mine.loading_since.get(adapter, now)
            for adapter, state in after.items()
            if state.status is AdapterStatus.LOADING
        }
        return Change(frozenset(gained), frozenset(gone))

    def _note_near(
        self, adapter: AdapterId, replica: ReplicaId, state: AdapterState | None
    ) -> None:
        near = self._near.get(adapter)
        if state is not None and _is_near(state):
            if near is None:
                near = self._near[adapter] = {}
            near[replica] = state
        elif near is not None and near.pop(replica, None) is not None and not near:
            del self._near[adapter]


_DISTANCE = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 2}


def _is_near(state: AdapterState) -> bool:
    return state.tier is not Tier.DISK or state.status is AdapterStatus.LOADING


def _nearer(state: AdapterState, was: AdapterState) -> bool:
    """Nearer the kernels than it was, or other weights: worth a second look at who waits for it."""
    return (
        _DISTANCE[state.tier] < _DISTANCE[was.tier]
        or state.status is not was.status
        or state.digest != was.digest
    )


def _version(states: Iterable[AdapterState]) -> str:
    votes: dict[str, int] = {}
    for state in states:
        votes[state.digest] = votes.get(state.digest, 0) + 1
    return min(votes, key=lambda digest: (-votes[digest], digest))
