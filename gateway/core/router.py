"""Which replica gets this request: least expected time to the first token, under the load bound.

Candidates are the replicas that serve the adapter (UP, or half open for a trial), in the order of
its ring; the first is its home. Those that were tried, are full or are at their bound are passed
over; of the rest the least sum wins, the earlier one in a tie:

    expected_s = queue_s    (load + 1 - capacity) places to wait for, at service_s each
               + load_s     0 in a slot; host_load_s or disk_load_s from there; what is left of it
                            when the load is under way (reported, or begun by a request of ours)
               + slot_s     service_s per adapter too many, when running and pinned ones hold
                            all slots
               + hop_s      hop_s per step from home, so that ties go home and nothing ping-pongs

    bound = max(ceil(load_factor * mean), load_floor)

The mean counts the request to be placed, and is taken over the candidates that have room, each with
its capacity as its weight. Hence a choice exists whenever a candidate has room: the one least
loaded for its capacity is below the mean, and so below its bound. A mean over the whole fleet would
not give that: an adapter that one replica in six serves would stop at a sixth of the load. The
floor is there because a bound on an idle fleet only splinters adapters over cold replicas.

The base model is everywhere: its requests go to the replica least loaded for its capacity, and
every replica is home to it.
"""

from __future__ import annotations

import math

from gateway.core.fleet import Fleet, Replica
from gateway.core.residency import ResidencyMap
from gateway.core.ring import AdapterRing
from gateway.core.terms import CandidateTerms as CandidateTerms
from gateway.core.terms import Choice as Choice
from gateway.core.terms import Kind as Kind
from gateway.core.terms import Tried, Weighed
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, Tier

_NONE: Tried = frozenset()


class Router:
    def __init__(
        self,
        *,
        ring: AdapterRing,
        residency: ResidencyMap,
        fleet: Fleet,
        load_factor: float,
        load_floor: int,
        host_load_s: float,
        disk_load_s: float,
        hop_s: float,
    ) -> None:
        self._ring = ring
        self._residency = residency
        self._fleet = fleet
        self._load_factor = load_factor
        self._load_floor = load_floor
        self._load_s = {Tier.GPU: 0.0, Tier.HOST: host_load_s, Tier.DISK: disk_load_s}
        self._hop_s = hop_s

    def pick(self, adapter: AdapterId | None, tried: Tried, now: float) -> Choice | None:
        """None when no candidate has room. Nothing is counted: the caller begins the request."""
        if adapter is None:
            return self._pick_base(tried)
        candidates = self._candidates(adapter)
        if not candidates:
            return None
        per_capacity = self._bound_per_capacity(candidates, tried)
        weighed: list[Weighed] = []
        best: Weighed | None = None
        for step, (mine, state) in enumerate(candidates):
            if best is not None and step * self._hop_s >= best.expected_s:
                break  # the hops alone cost more: nobody further on can win
            this = self._weigh(mine, state, step, tried, per_capacity, now)
            weighed.append(this)
            if not this.refused and (best is None or this.expected_s < best.expected_s):
                best = this
        return None if best is None else self._choice(adapter, best, weighed)

    def could_take(self, adapter: AdapterId | None, tried: Tried) -> Tried:
        """Replicas that were not tried and serve it, whether they have room or not."""
        where = self._fleet.replicas if adapter is None else self._residency.holders(adapter)
        return frozenset(where) - tried

    def hope(self, adapter: AdapterId | None, tried: Tried) -> bool:
        """Some replica that was not tried serves it: waiting makes sense.

        One that failed elsewhere has waited enough to sit out an ejection too.
        """
        where = self._fleet.replicas if adapter is None else self._residency.holders(adapter)
        hopeful, patient = self._fleet.hopeful, not tried
        return any(hopeful(replica, patient=patient) for replica in where if replica not in tried)

    def explain(self, adapter: AdapterId | None, now: float) -> tuple[CandidateTerms, ...]:
        """Every replica of the fleet, candidates first in their order, and why it would not do."""
        candidates = self._base_candidates() if adapter is None else self._candidates(adapter)
        per_capacity = self._bound_per_capacity(candidates, frozenset())
        weighed = [
            self._weigh(mine, state, step if adapter else 0, frozenset(), per_capacity, now)
            for step, (mine, state) in enumerate(candidates)
        ]
        others = self._fleet.replicas.keys() - {this.mine.id for this in weighed}
        return (
            *(this.terms() for this in weighed),
            *(self._no_candidate(self._fleet.replicas[r], adapter) for r in sorted(others)),
        )

    # -- inside

    def _candidates(self, adapter: AdapterId) -> list[_Candidate]:
        holders = self._residency.holders(adapter)
        replicas = self._fleet.replicas
        return [
            (mine, holders[replica])
            for replica in self._ring.order(adapter)
            if replica in holders and (mine := replicas[replica]).serving
        ]

    def _base_candidates(self) -> list[_Candidate]:
        up = [mine for mine in self._fleet.replicas.values() if mine.serving]
        return [(mine, None) for mine in sorted(up, key=_relative_load)]

    def _pick_base(self, tried: Tried) -> Choice | None:
        replicas = (self._fleet.replicas[replica] for replica in self._fleet.open)
        free = [mine for mine in replicas if mine.id not in tried]
        if not free:
            return None
        best = min(free, key=_relative_load)  # below the mean, so below the bound
        per_capacity = self._bound_per_capacity([(mine, None) for mine in free], tried)
        weighed = self._weigh(best, None, 0, tried, per_capacity, 0.0)
        return Choice(best.id, Kind.HOME, "", 0.0, (weighed,), _NONE)

    def _bound_per_capacity(self, candidates: list[_Candidate], tried: Tried) -> float:
        load, capacity = 1, 0
        for mine, _ in candidates:
            if mine.load < mine.limit and mine.id not in tried:
                load += mine.load
                capacity += mine.capacity
        return self._load_factor * load / capacity if capacity else 0.0

    def _weigh(
        self,
        mine: Replica,
        state: AdapterState | None,
        step: int,
        tried: Tried,
        per_capacity: float,
        now: float,
    ) -> Weighed:
        load, hop_s = mine.load, step * self._hop_s
        bound = max(math.ceil(per_capacity * mine.capacity), self._load_floor)
        if mine.id in tried:
            refused = "tried"
        elif load >= mine.limit:
            refused = "full"
        else:
            refused = "bound" if load >= bound else ""
        waits = load + 1 - mine.capacity
        queue_s = waits * mine.service_s if waits > 0 else 0.0
        load_s = slot_s = 0.0
        if state is not None and not _in_slot(state):
            load_s, slot_s = self._load_terms(mine, state, now)
        expected_s = queue_s + load_s + slot_s + hop_s
        return Weighed(
            expected_s,
            refused,
            mine,
            state,
            step,
            load,
            min(bound, mine.limit),
            queue_s,
            load_s,
            slot_s,
            hop_s,
        )

    def _load_terms(self, mine: Replica, state: AdapterState, now: float) -> tuple[float, float]:
        """(load_s, slot_s) of an adapter that is not in a slot there."""
        load_s = self._load_s[state.tier]
        since = self._under_way_since(mine, state)
        if since is not None:
            return max(0.0, load_s - max(0.0, now - since)), 0.0
        return load_s, max(0, mine.slots_held() + 1 - mine.slots) * mine.service_s

    def _under_way_since(self, mine: Replica, state: AdapterState) -> float | None:
        """When its load began there: as reported, or for a request of ours."""
        if state.status is AdapterStatus.LOADING:
            return self._residency.loading_since(mine.id, state.adapter)
        use = mine.ours.get(state.adapter)
        return use.since if use is not None else None

    def _choice(self, adapter: AdapterId, best: Weighed, weighed: list[Weighed]) -> Choice:
        state = self._residency.holders(adapter)[best.mine.id]
        awaited, telling, new_load_s = _NONE, weighed, 0.0
        if len(weighed) > 1:
            awaited = frozenset(
                w.mine.id
                for w in weighed
                if w.refused and w.refused != "tried" and w.load_s < best.load_s
            )
            telling = [
                this
                for this in weighed
                if this is best or this.step == 0 or this.expected_s < best.expected_s
            ]
        if best.load_s and self._under_way_since(best.mine, state) is None:
            new_load_s = best.load_s
        kind = _kind(best, home=weighed[0])
        return Choice(best.mine.id, kind, state.digest, new_load_s, telling, awaited)

    def _no_candidate(self, mine: Replica, adapter: AdapterId | None) -> CandidateTerms:
        state = None if adapter is None else self._residency.holders(adapter).get(mine.id)
        refused = "absent" if mine.serving else mine.state.value
        tier = None if state is None else state.tier
        return CandidateTerms(mine.id, -1, tier, mine.load, 0, 0.0, 0.0, 0.0, 0.0, refused)


_Candidate = tuple[Replica, AdapterState | None]


def _relative_load(mine: Replica) -> tuple[float, ReplicaId]:
    return (mine.load / max(1, mine.capacity), mine.id)


def _in_slot(state: AdapterState) -> bool:
    return state.tier is Tier.GPU and state.status is AdapterStatus.READY


def _kind(chosen: Weighed, home: Weighed) -> Kind:
    resident = chosen.state is not None and chosen.state.tier is not Tier.DISK
    if chosen is home:
        return Kind.HOME if resident else Kind.COLD
    if resident:
        return Kind.WARM
    return Kind.SPILL if home.refused else Kind.COLD
