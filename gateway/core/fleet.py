"""Who is alive, and how busy: the life cycle of each replica and the places it has left.

    UNKNOWN --report--> UP <--drain/resume--> DRAINING      any --silence, loss--> LOST
                        UP --failed connection--> SUSPECT   SUSPECT, LOST --next report--> UP

Only an UP replica is given requests. Silence for `silence_heartbeats` of its own heartbeats is a
loss; a failed connection only stops dispatch until the replica speaks again, since reports are the
probe and the next one is at most a heartbeat away.

    load  = in_flight + elsewhere           elsewhere = max(0, running + waiting - in_flight)
    limit = capacity + max(1, capacity // 8)

`in_flight` is what we sent and have not seen end, exact at every instant; `elsewhere` is what the
replica has beyond that (other gateways, direct callers), as of its last report. A replica is open
while load < limit. Requests beyond its capacity wait inside it, where no fairness reigns; the small
overlap is there so that it need not idle while a finish travels to us and the next request back.

The time a full replica takes from one end of a request to the next is measured, and is what a place
in its queue costs; `service_s` stands in until then. Requests in flight are leases by id: each ends
once, also when its replica has meanwhile been lost, removed or added anew.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import AdapterState, ReplicaReport, Tier

FIRST_HEARTBEAT_S: Final = 1.0
"""Assumed of a replica that has not said its own yet."""

_SMOOTHING: Final = 0.1
"""Of the measured service time: a new sample counts this much."""


class ReplicaState(StrEnum):
    UNKNOWN = "unknown"
    UP = "up"
    SUSPECT = "suspect"
    DRAINING = "draining"
    LOST = "lost"


@dataclass(slots=True)
class InUse:
    """Our requests for one adapter on one replica."""

    requests: int
    since: float


@dataclass(slots=True, eq=False)
class Replica:
    """Written by Fleet alone; others read."""

    id: ReplicaId
    service_s: float
    state: ReplicaState = ReplicaState.UNKNOWN
    said: ReplicaReport | None = None
    heard_at: float = 0.0  # when added, then of the last report
    drained: bool = False  # by an operator of this gateway
    in_flight: int = 0
    load: int = 0
    capacity: int = 0
    limit: int = 0
    slots: int = 0
    ours: dict[AdapterId, InUse] = field(default_factory=dict)
    held: frozenset[AdapterId] = frozenset()  # reported: pinned, or sequences run with them
    full_since: float | None = None  # it was full when this end of a request was seen

    @property
    def open(self) -> bool:
        return self.state is ReplicaState.UP and self.load < self.limit

    def slots_held(self) -> int:
        """Slots that no load can have now: pinned, or of adapters that run or are about to."""
        return len(self.held | self.ours.keys()) if self.ours else len(self.held)


class Fleet:
    def __init__(self, *, service_s: float, silence_heartbeats: float) -> None:
        self._service_s = service_s
        self._silence_heartbeats = silence_heartbeats
        self._replicas: dict[ReplicaId, Replica] = {}
        self._leases: dict[RequestId, tuple[Replica, AdapterId | None]] = {}
        self._open: set[ReplicaId] = set()
        self.bases: frozenset[str] = frozenset()  # names that requests use for the base model
        self._silent_from = math.inf  # no replica can have been silent too long before this

    # -- life cycle

    def add(self, replica: ReplicaId, now: float) -> None:
        """Harmless when it is there already."""
        if replica not in self._replicas:
            self._replicas[replica] = mine = Replica(replica, self._service_s, heard_at=now)
            self._silent_from = min(self._silent_from, now + self._patience_s(mine))

    def remove(self, replica: ReplicaId) -> None:
        """Its requests in flight may still end; they touch nothing that comes back by its name."""
        self._replicas.pop(replica, None)
        self._open.discard(replica)
        self._name_bases()

    def report(self, report: ReplicaReport, now: float) -> None:
        """A newer report of a replica that was added (the caller has checked both)."""
        mine, before = self._replicas[report.replica], self._replicas[report.replica].said
        mine.said, mine.heard_at, mine.slots = report, now, report.slots
        self._silent_from = min(self._silent_from, now + self._patience_s(mine))
        mine.capacity = max(0, report.capacity)
        mine.limit = mine.capacity + max(1, mine.capacity // 8) if mine.capacity else 0
        mine.load = max(mine.in_flight, report.running + report.waiting)
        mine.held = frozenset(s.adapter for s in report.adapters if _holds_slot(s))
        self._settle_state(mine)
        if before is None or before.base != report.base:
            self._name_bases()

    def lose(self, replica: ReplicaId) -> None:
        """Silent too long, or its stream broke: nothing goes there until it reports again."""
        self._enter(self._replicas[replica], ReplicaState.LOST)

    def suspect(self, replica: ReplicaId) -> None:
        """A connection to it failed."""
        if self._replicas[replica].state is ReplicaState.UP:
            self._enter(self._replicas[replica], ReplicaState.SUSPECT)

    def drain(self, replica: ReplicaId, on: bool) -> None:
        """Operator's word; a replica may also say of itself that it drains, and then it does."""
        mine = self._replicas[replica]
        mine.drained = on
        if mine.state in (ReplicaState.UP, ReplicaState.DRAINING):
            self._settle_state(mine)

    def silent(self, now: float) -> list[ReplicaId]:
        """Replicas to `lose` now, told once. Nothing is looked at before one can be due."""
        if now < self._silent_from:
            return []
        due = {r.id: r.heard_at + self._patience_s(r) for r in self._waited_for()}
        self._silent_from = min((at for at in due.values() if at > now), default=math.inf)
        return sorted(replica for replica, at in due.items() if at <= now)

    def silence_due(self) -> float:
        """When `silent` may next have something to say: never late, early after a report."""
        return self._silent_from

    # -- requests

    def begin(
        self, request: RequestId, replica: ReplicaId, adapter: AdapterId | None, now: float
    ) -> None:
        mine = self._replicas[replica]
        assert request not in self._leases, f"{request} is in flight already"
        assert mine.open, f"{replica} is {mine.state} at {mine.load} of {mine.limit}"
        self._leases[request] = (mine, adapter)
        mine.in_flight += 1
        mine.load += 1
        if adapter is not None:
            mine.ours.setdefault(adapter, InUse(0, now)).requests += 1
        self._update_open(mine)

    def finish(self, request: RequestId, now: float) -> ReplicaId | None:
        """The replica that has a place more, or None when the lease had ended before."""
        lease = self._leases.pop(request, None)
        if lease is None:
            return None
        mine, adapter = lease
        self._measure(mine, now)
        mine.in_flight -= 1
        mine.load -= 1
        if adapter is not None:
            mine.ours[adapter].requests -= 1
            if not mine.ours[adapter].requests:
                del mine.ours[adapter]
        if self._replicas.get(mine.id) is mine:
            self._update_open(mine)
        return mine.id

    # -- questions

    @property
    def open(self) -> Collection[ReplicaId]:
        """Replicas that can take one more."""
        return self._open

    @property
    def replicas(self) -> Mapping[ReplicaId, Replica]:
        return self._replicas

    @property
    def leases(self) -> Collection[RequestId]:
        return self._leases.keys()

    @property
    def incomplete(self) -> bool:
        """A replica has yet to say what it serves."""
        return any(mine.state is ReplicaState.UNKNOWN for mine in self._replicas.values())

    def hopeful(self, replica: ReplicaId) -> bool:
        """It takes requests, or may again as soon as it speaks."""
        mine = self._replicas.get(replica)
        return (
            mine is not None
            and not mine.drained
            and mine.state in (ReplicaState.UP, ReplicaState.SUSPECT)
        )

    def check(self) -> None:
        counts: dict[int, int] = {}
        for mine, _ in self._leases.values():
            counts[id(mine)] = counts.get(id(mine), 0) + 1
        for mine in self._replicas.values():
            assert mine.in_flight == counts.get(id(mine), 0), f"{mine.id}: leases and count differ"
            assert 0 <= mine.in_flight <= mine.load, f"{mine.id}: {mine.in_flight} of {mine.load}"
            assert sum(use.requests for use in mine.ours.values()) <= mine.in_flight
            assert all(use.requests > 0 for use in mine.ours.values())
            assert (mine.id in self._open) == mine.open, f"{mine.id}: open is out of step"
        assert self._open <= self._replicas.keys()

    # -- inside

    def _name_bases(self) -> None:
        self.bases = frozenset(r.said.base for r in self._replicas.values() if r.said is not None)

    def _settle_state(self, mine: Replica) -> None:
        draining = mine.drained or (mine.said is not None and mine.said.draining)
        self._enter(mine, ReplicaState.DRAINING if draining else ReplicaState.UP)

    def _enter(self, mine: Replica, state: ReplicaState) -> None:
        mine.state = state
        if state is ReplicaState.LOST:
            mine.load, mine.held = mine.in_flight, frozenset()
        self._update_open(mine)

    def _update_open(self, mine: Replica) -> None:
        if mine.open:
            self._open.add(mine.id)
        else:
            self._open.discard(mine.id)

    def _measure(self, mine: Replica, now: float) -> None:
        """A sample of the service time: from end to end while the replica stays full."""
        if mine.load < mine.capacity:
            mine.full_since = None
            return
        if mine.full_since is not None:
            mine.service_s += _SMOOTHING * (max(0.0, now - mine.full_since) - mine.service_s)
        mine.full_since = now

    def _waited_for(self) -> Iterable[Replica]:
        return (r for r in self._replicas.values() if r.state is not ReplicaState.LOST)

    def _patience_s(self, mine: Replica) -> float:
        heartbeat_s = mine.said.heartbeat_s if mine.said is not None else FIRST_HEARTBEAT_S
        return self._silence_heartbeats * heartbeat_s


def _holds_slot(state: AdapterState) -> bool:
    return state.running > 0 or (state.pinned and state.tier is Tier.GPU)
