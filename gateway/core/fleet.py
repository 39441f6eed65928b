"""Who is alive, and how busy: the life cycle of each replica and the places it has left.

    UNKNOWN --report--> UP <--drain/resume--> DRAINING      any --silence, loss--> LOST
                        UP --failed connection--> SUSPECT   SUSPECT, LOST --next report--> UP
                        UP --> EJECTED --> HALF_OPEN --> UP     (gateway/core/health.py)

Only an UP replica is given requests, and a HALF_OPEN one its trials. Silence is a loss
(gateway/core/silence.py); a failed connection only stops dispatch until the replica speaks again,
since reports are the probe and the next one is at most a heartbeat away.

    load  = in_flight + elsewhere           elsewhere = max(0, running + waiting - in_flight)
    limit = capacity + max(1, capacity // 8)    whole; less in slow start, none beside a trial

`in_flight` is what we sent and have not seen end, exact at every instant; `elsewhere` is what the
replica has beyond that (other gateways, direct callers), as of its last report. A replica is open
while load < limit. Requests beyond its capacity wait inside it, where no fairness reigns; the small
overlap is there so that it need not idle while a finish travels to us and the next request back.

The time a full replica takes from one end of a request to the next is measured, and is what a place
in its queue costs; `service_s` stands in until then. Requests in flight are leases by id: each ends
once, also when its replica has meanwhile been lost, removed or added anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Final

from gateway.core.breaker import HealthRules
from gateway.core.health import Health
from gateway.core.health import Verdict as Verdict
from gateway.core.pools import Pools
from gateway.core.replica import Conduct as Conduct
from gateway.core.replica import InUse as InUse
from gateway.core.replica import Replica as Replica
from gateway.core.replica import ReplicaState as ReplicaState
from gateway.core.silence import Silence
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

_SMOOTHING: Final = 0.1
"""Of the measured service time: a new sample counts this much."""


class Fleet:
    def __init__(
        self,
        *,
        service_s: float,
        silence_heartbeats: float,
        rules: HealthRules | None = None,
        vnodes: int = 128,
        reserve_share: float = 0.0,
    ) -> None:
        self._service_s = service_s
        self._reserve_share = reserve_share
        self._replicas: dict[ReplicaId, Replica] = {}
        self._leases: dict[RequestId, tuple[Replica, AdapterId | None]] = {}
        self._open: set[ReplicaId] = set()
        self._roomy: set[ReplicaId] = set()
        self.pools: Final = Pools(vnodes=vnodes)
        self.using: Final[dict[AdapterId, dict[ReplicaId, Replica]]] = {}
        """Where requests of ours run, by adapter: the inverse of each replica's `ours`."""
        self.bases: frozenset[str] = frozenset()  # names that requests use for the base model
        self.silence: Final = Silence(self._replicas, heartbeats=silence_heartbeats)
        self.health: Final = Health(self._replicas, rules or HealthRules(), self._settle)

    # -- life cycle

    def add(self, replica: ReplicaId, now: float) -> None:
        """Harmless when it is there already."""
        if replica not in self._replicas:
            mine = Replica(
                replica, self._service_s, heard_at=now, reserve_share=self._reserve_share
            )
            self._replicas[replica] = mine
            self.silence.heard(mine, now)

    def remove(self, replica: ReplicaId, now: float) -> None:
        """Its requests in flight may still end; they touch nothing that comes back by its name."""
        mine = self._replicas.pop(replica, None)
        if mine is not None:
            self.pools.remove(mine)
            for adapter in mine.ours:
                self._uses_no_more(mine, adapter)
        self._open.discard(replica)
        self._roomy.discard(replica)
        self._name_bases()
        self.health.uphold(now)

    def report(self, report: ReplicaReport, now: float) -> None:
        """A newer report of a replica that was added (the caller has checked both)."""
        mine, before = self._replicas[report.replica], self._replicas[report.replica].said
        mine.said, mine.heard_at, mine.slots = report, now, report.slots
        mine.look_until = None
        self.silence.heard(mine, now)
        mine.capacity = max(0, report.capacity)
        mine.load = max(mine.in_flight, report.running + report.waiting)
        mine.held = frozenset(s.adapter for s in report.adapters if _holds_slot(s))
        mine.slots_used = sum(map(_in_slot, report.adapters))
        self.pools.reported(mine)
        self.health.reported(mine, boot_before=before.boot if before else None, now=now)
        was = mine.state
        self._enter(mine, _standing(mine))
        if mine.state is not was:
            self.health.uphold(now)
        if before is None or before.base != report.base:
            self._name_bases()

    def lose(self, replica: ReplicaId, now: float) -> None:
        """Silent too long, or its stream broke: nothing goes there until it reports again."""
        self._enter(self._replicas[replica], ReplicaState.LOST)
        self.health.uphold(now)

    def drain(self, replica: ReplicaId, on: bool, now: float) -> None:
        """Operator's word; a replica may also say of itself that it drains, and then it does."""
        mine = self._replicas[replica]
        mine.drained = on
        if mine.state not in (ReplicaState.UNKNOWN, ReplicaState.SUSPECT, ReplicaState.LOST):
            self._enter(mine, _standing(mine))
        self.health.uphold(now)

    # -- requests

    def begin(
        self,
        request: RequestId,
        replica: ReplicaId,
        adapter: AdapterId | None,
        now: float,
        *,
        streams: bool = False,
    ) -> None:
        mine = self._replicas[replica]
        assert request not in self._leases, f"{request} is in flight already"
        assert mine.open, f"{replica} is {mine.state} at {mine.load} of {mine.limit}"
        self._leases[request] = (mine, adapter)
        mine.in_flight += 1
        mine.load += 1
        if adapter is not None:
            use = mine.ours.get(adapter)
            if use is None:
                use = mine.ours[adapter] = InUse(0, now)
                self.using.setdefault(adapter, {})[replica] = mine
            use.requests += 1
        self.health.began(mine, request, now, streams=streams)
        self._update_open(mine)

    def answered(self, request: RequestId, now: float) -> None:
        """The first token of a request that streams has come."""
        lease = self._leases.get(request)
        if lease is not None:
            self.health.answered(lease[0], request, now)

    def finish(
        self, request: RequestId, now: float, conduct: Conduct | None = None
    ) -> ReplicaId | None:
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
                self._uses_no_more(mine, adapter)
        if self._replicas.get(mine.id) is mine:
            self.health.ended(mine, request, conduct, now)
            if conduct is Conduct.GONE and mine.state is ReplicaState.UP:
                self._enter(mine, ReplicaState.SUSPECT)
            self._update_open(mine)
        return mine.id

    def keep(self, wanted: Collection[ReplicaId], turn: float) -> bool:
        """One whose turn it is waits for a place of anyone's on one of these; so who comes after it
        gets none of their last ones. False when they have none: all are full."""
        kept = self._open.intersection(wanted)
        for replica in kept:
            mine = self._replicas[replica]
            mine.kept_from = min(mine.kept_from, turn)
        return bool(kept)

    # -- questions

    @property
    def open(self) -> Set[ReplicaId]:
        """Replicas that can take one more."""
        return self._open

    @property
    def roomy(self) -> Set[ReplicaId]:
        """Of the open ones those that can take one more of anyone's (gateway/core/reserve.py)."""
        return self._roomy

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

    def hopeful(self, replica: ReplicaId, *, patient: bool = True) -> bool:
        """It takes requests, or may again as soon as it speaks; or after its ejection."""
        mine = self._replicas.get(replica)
        if mine is None or mine.drained:
            return False
        ejected = mine.state is ReplicaState.EJECTED
        return mine.serving or mine.state is ReplicaState.SUSPECT or (ejected and patient)

    def check(self) -> None:
        requests: dict[int, set[RequestId]] = {}
        for request, (mine, _) in self._leases.items():
            requests.setdefault(id(mine), set()).add(request)
        for mine in self._replicas.values():
            mine.check(requests.get(id(mine), set()))
            assert (mine.id in self._open) == mine.open, f"{mine.id}: open is out of step"
            assert (mine.id in self._roomy) == mine.roomy, f"{mine.id}: roomy is out of step"
        self.health.check()
        self.pools.check(self._replicas.values())
        using = {a: {r.id for r in self._replicas.values() if a in r.ours} for a in self.using}
        assert using == {a: set(where) for a, where in self.using.items()}
        assert self._roomy <= self._open <= self._replicas.keys()

    # -- inside

    def _name_bases(self) -> None:
        self.bases = frozenset(r.said.base for r in self._replicas.values() if r.said is not None)

    def _settle(self, mine: Replica) -> None:
        """Its health has changed: so has its state, unless it is away, and its places."""
        away = (ReplicaState.UNKNOWN, ReplicaState.SUSPECT, ReplicaState.LOST)
        self._enter(mine, mine.state if mine.state in away else _standing(mine))

    def _enter(self, mine: Replica, state: ReplicaState) -> None:
        mine.state = state
        mine.serving = state in (ReplicaState.UP, ReplicaState.HALF_OPEN)
        if state is ReplicaState.LOST:
            mine.load, mine.held, mine.look_until = mine.in_flight, frozenset(), None
        mine.settle_limit()
        self._update_open(mine)

    def _update_open(self, mine: Replica) -> None:
        (self._open.add if mine.open else self._open.discard)(mine.id)
        (self._roomy.add if mine.roomy else self._roomy.discard)(mine.id)
        self.pools.note(mine)

    def _uses_no_more(self, mine: Replica, adapter: AdapterId) -> None:
        """Unless another of its name runs it by now."""
        where = self.using.get(adapter, {})
        if where.get(mine.id) is mine:
            del where[mine.id]
            if not where:
                del self.using[adapter]

    def _measure(self, mine: Replica, now: float) -> None:
        """A sample of the service time: from end to end while the replica stays full."""
        if mine.load < mine.capacity:
            mine.full_since = None
            return
        if mine.full_since is not None:
            mine.service_s += _SMOOTHING * (max(0.0, now - mine.full_since) - mine.service_s)
        mine.full_since = now


def _standing(mine: Replica) -> ReplicaState:
    """What one that speaks is."""
    if mine.draining:
        return ReplicaState.DRAINING
    if mine.breaker.out:
        return ReplicaState.HALF_OPEN if mine.breaker.half_open else ReplicaState.EJECTED
    return ReplicaState.UP


def _in_slot(state: AdapterState) -> bool:
    return state.tier is Tier.GPU or state.status is AdapterStatus.LOADING


def _holds_slot(state: AdapterState) -> bool:
    return state.running > 0 or (state.pinned and state.tier is Tier.GPU)
