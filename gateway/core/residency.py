"""Which replica holds which adapter version in which tier, from the replicas' own reports.

A report is a whole snapshot, so applying one replaces all that was known of its replica. Reports of
one life of a process (`boot`) are ordered by `seq`; an older or repeated one changes nothing. A new
boot starts over, and a boot that has been replaced never speaks again. However reports are lost,
repeated or reordered, the map ends in the newest one.

The map is kept both ways: replica -> its adapters, and adapter -> {replica: state} (READY and
LOADING only: a FAILED adapter is not routable). The second is what the router reads, and equals a
rebuild from the first. A lost replica holds nothing, but its adapters' names are remembered until
it reports again or is removed: to forget them would turn a restart into `404 no such model`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

ANY = AdapterId("*")
"""Reported by a replica that takes every name: it holds each adapter that nobody names."""

_BOOTS_REMEMBERED = 8
_NOBODY: Mapping[ReplicaId, AdapterState] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Change:
    """What one event did to the routable adapters of a replica."""

    gained: frozenset[AdapterId] = frozenset()  # now served there, of another version, or nearer
    gone: frozenset[AdapterId] = frozenset()  # no longer served there


@dataclass(slots=True)
class _Holdings:
    boot: str = ""
    seq: int = -1
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_BOOTS_REMEMBERED))
    routable: dict[AdapterId, AdapterState] = field(default_factory=dict)
    reported: tuple[AdapterState, ...] = ()  # FAILED ones included
    loading_since: dict[AdapterId, float] = field(default_factory=dict)
    remembered: frozenset[AdapterId] = frozenset()  # of a lost replica


class ResidencyMap:
    def __init__(self) -> None:
        self._of: dict[ReplicaId, _Holdings] = {}
        self._holders: dict[AdapterId, dict[ReplicaId, AdapterState]] = {}

    def apply(self, report: ReplicaReport, now: float) -> Change | None:
        """None when the report is stale or a repetition: nothing changed."""
        mine = self._of.setdefault(report.replica, _Holdings())
        if report.boot in mine.retired or (report.boot == mine.boot and report.seq <= mine.seq):
            return None
        if report.boot != mine.boot and mine.seq >= 0:
            mine.retired.append(mine.boot)
            mine.loading_since.clear()
        mine.boot, mine.seq = report.boot, report.seq
        mine.reported, mine.remembered = report.adapters, frozenset()
        return self._replace(report.replica, mine, report.adapters, now)

    def lose(self, replica: ReplicaId) -> Change:
        """It holds nothing until its next report, which still must be newer than its last."""
        mine = self._of.get(replica)
        if mine is None:
            return Change()
        mine.remembered |= mine.routable.keys()
        mine.reported = ()
        return self._replace(replica, mine, (), 0.0)

    def forget(self, replica: ReplicaId) -> Change:
        """It left the fleet: nothing of it is remembered, its boots neither."""
        change = self.lose(replica)
        self._of.pop(replica, None)
        return change

    def holders(self, adapter: AdapterId) -> Mapping[ReplicaId, AdapterState]:
        """Replicas that serve the adapter, whatever the tier. A live view: do not keep it."""
        held = self._holders.get(adapter)
        return self._holders.get(ANY, _NOBODY) if held is None else held

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
        return bool(self.holders(adapter)) or any(
            adapter in mine.remembered or ANY in mine.remembered for mine in self._of.values()
        )

    def adapters(self) -> dict[AdapterId, str]:
        """Every served adapter with its version: the one most replicas have, then the least."""
        return {
            adapter: _version(held.values())
            for adapter, held in self._holders.items()
            if adapter != ANY
        }

    def check(self) -> None:
        rebuilt: dict[AdapterId, dict[ReplicaId, AdapterState]] = {}
        for replica, mine in self._of.items():
            assert not (mine.remembered and mine.routable), f"{replica} is lost and holds"
            assert mine.boot not in mine.retired, f"{replica} is back in a replaced boot"
            loading = {a for a, s in mine.routable.items() if s.status is AdapterStatus.LOADING}
            assert mine.loading_since.keys() == loading, f"{replica}: loads out of step"
            for adapter, state in mine.routable.items():
                rebuilt.setdefault(adapter, {})[replica] = state
        assert rebuilt == self._holders, "the inverse index is not the inverse"

    def _replace(
        self, replica: ReplicaId, mine: _Holdings, states: Iterable[AdapterState], now: float
    ) -> Change:
        before, after = mine.routable, {}
        gained = []
        for state in states:
            if state.status is AdapterStatus.FAILED:
                continue
            adapter = state.adapter
            after[adapter] = state
            was = before.get(adapter)
            if was is None:
                self._holders.setdefault(adapter, {})[replica] = state
                gained.append(adapter)
            elif was is not state:
                self._holders[adapter][replica] = state
                if _nearer(state, was):
                    gained.append(adapter)
        gone = before.keys() - after.keys()
        for adapter in gone:
            held = self._holders[adapter]
            del held[replica]
            if not held:
                del self._holders[adapter]
        mine.routable = after
        mine.loading_since = {
            adapter: mine.loading_since.get(adapter, now)
            for adapter, state in after.items()
            if state.status is AdapterStatus.LOADING
        }
        return Change(frozenset(gained), frozenset(gone))


_DISTANCE = {Tier.GPU: 0, Tier.HOST: 1, Tier.DISK: 2}


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
