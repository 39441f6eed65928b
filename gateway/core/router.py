"""Which replica gets this request: least expected time to the first token, under the load bound.

Candidates are the replicas that serve the adapter (UP, or half open for a trial), in the order of
its pools and in each of its ring; the first is its home. Those that were tried, are full or are at
their bound are passed over; of the rest the least expected time wins, the earlier one in a tie
(gateway/core/scales.py has both sums).

The mean is the load for its capacity of the pool's members that have room, the request to be placed
included. The floor, near a real batch, is there because a bound on an idle fleet only splinters
adapters over cold replicas. When an adapter's own candidates are all above the bound though one has
room (one replica in six serves it, and would stop at a sixth of the load), the mean is theirs: so a
choice exists whenever a candidate has room.

The cost of a decision does not grow with the fleet. The walk from home ends as soon as the hops
alone cost more than the best has, and when nothing but disks is left after one that would do; it
goes REACH steps at most. What lies beyond is looked at only when the walk has found nobody with
room, or holds the adapter nearer than disk; then the pool's least loaded are asked.

The base model is everywhere in its pools: its requests go to the replica least loaded for its
capacity, and every replica is home to it. Where some of its places are kept for those who hold
little (gateway/core/reserve.py), these go to the one of the least loaded that has the fewest
prompts to read before theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from gateway.core.fleet import Fleet, Replica
from gateway.core.pool import Pool
from gateway.core.reserve import FIRST, NONE
from gateway.core.residency import ResidencyMap
from gateway.core.ring import REACH
from gateway.core.scales import Candidate, Scales
from gateway.core.terms import WHILE_FULL, Ask, Model, Tried, Weighed, kind_of
from gateway.core.terms import Base as Base
from gateway.core.terms import CandidateTerms as CandidateTerms
from gateway.core.terms import Choice as Choice
from gateway.core.terms import Kind as Kind
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState

_NONE: Tried = frozenset()
_NOWHERE: Mapping[ReplicaId, Replica] = {}
_FEW = 8


class Router:
    def __init__(
        self,
        *,
        residency: ResidencyMap,
        fleet: Fleet,
        scales: Scales,
    ) -> None:
        self._residency = residency
        self._fleet = fleet
        self._scales = scales

    def pick(
        self, model: Model, tried: Tried, now: float, *, claim: float = FIRST
    ) -> Choice | None:
        """None when no candidate has room, or none but last places to which its claim is too weak.
        Nothing is counted: the caller begins the request."""
        ask = Ask(tried, claim, now)
        if model is None or isinstance(model, Base):
            return self._pick_base(model, ask)
        weighed: list[Weighed] = []
        best = self._walk(model, ask, weighed)
        if best is None and weighed:
            best = self._by_their_own_mean(model, ask, weighed)
        return None if best is None else self._choice(model, best, weighed)

    def could_take(self, model: Model, tried: Tried) -> Tried:
        """Replicas that were not tried and serve it, whether they have room or not."""
        return frozenset(self._where(model)) - tried

    def hope(self, model: Model, tried: Tried) -> bool:
        """Some replica that was not tried serves it: waiting makes sense.

        One that failed elsewhere has waited enough to sit out an ejection too.
        """
        left = (replica for replica in self._where(model) if replica not in tried)
        return any(self._fleet.hopeful(replica, patient=not tried) for replica in left)

    def explain(self, model: Model, now: float) -> tuple[CandidateTerms, ...]:
        """Every replica of the fleet, candidates first in their order, and why it would not do."""
        candidates = list(self._base_candidates(model) if _is_base(model) else self._all(model))
        ask = Ask(_NONE, FIRST, now)
        weighed = self._compare(model, candidates, ask)
        if all(one.refused for one in weighed):
            mean = self._scales.their_mean(candidates, ask)
            weighed = self._compare(model, candidates, ask, mean)
        others = self._fleet.replicas.keys() - {this.mine.id for this in weighed}
        return (
            *(this.terms() for this in weighed),
            *(self._no_candidate(self._fleet.replicas[r], model) for r in sorted(others)),
        )

    # -- candidates

    def _where(self, model: Model) -> Iterable[ReplicaId]:
        if model is None:
            return self._fleet.replicas
        if isinstance(model, Base):
            return [r for pool in self._fleet.pools.for_base(model) for r in pool.members]
        return self._residency.holders(model)

    def _all(self, model: Model) -> Iterator[tuple[Pool, Replica, AdapterState]]:
        """Every candidate of an adapter in its order: all the way round."""
        assert model is not None
        holders = self._residency.holders(AdapterId(model))
        for pool in self._fleet.pools.for_adapter(AdapterId(model)):
            for replica in pool.ring.order(AdapterId(model)):
                state = holders.get(replica)
                if state is not None and pool.members[replica].serving:
                    yield pool, pool.members[replica], state

    def _base_candidates(self, model: Model) -> list[Candidate]:
        up: list[Candidate] = [
            (pool, mine, None)
            for pool in self._fleet.pools.for_base(model)
            for mine in pool.members.values()
            if mine.serving
        ]
        return sorted(up, key=lambda one: (one[1].busy, one[1].id))

    def _pick_base(self, model: Base | None, ask: Ask) -> Choice | None:
        light = FIRST < ask.claim < NONE
        found = [
            (*self._scales.of_base(pool, mine, light=light), mine.id, pool, mine)
            for pool in self._fleet.pools.for_base(model)
            for mine in pool.least_loaded(_FEW if light else 1, ask.tried, claim=ask.claim)
        ]
        if not found:
            return None
        *_, pool, best = min(found)  # below the mean, so below the bound, or below it anyway
        weighed = self._scales.weigh(best, None, 0, ask, self._scales.per_capacity(pool))
        if weighed.refused:  # at the bound, as all others are that were not tried
            weighed.refused = ""
        return Choice(best.id, Kind.HOME, "", False, (weighed,), _NONE)

    # -- the walk

    def _walk(
        self,
        adapter: AdapterId,
        ask: Ask,
        weighed: list[Weighed],
    ) -> Weighed | None:
        """The best under its pool's bound; `weighed` gets whoever was looked at closely."""
        best: Weighed | None = None
        near, using = self._residency.near(adapter), self._fleet.using.get(adapter, _NOWHERE)
        holders: Mapping[ReplicaId, AdapterState] | None = None
        step, hop_s = 0, self._scales.hop_s
        near_anywhere = bool(near)
        ahead = len(near.keys() | using.keys()) if using else len(near)  # of those: not met yet
        cold_s = self._scales.second_copy_s if near else self._scales.disk_load_s
        for pool in self._fleet.pools.for_adapter(adapter):
            members, per_capacity = pool.members, self._scales.per_capacity(pool)
            for replica in pool.ring.walk(adapter):
                state = near.get(replica)
                here = state is not None or replica in using
                if state is None:
                    if holders is None:
                        holders = self._residency.holders(adapter)
                    state = holders.get(replica)
                    if state is None:
                        continue
                mine = members[replica]
                if not mine.serving:
                    continue
                if best is not None:
                    far_s = step * hop_s
                    if far_s >= best.expected_s:
                        return best  # the hops alone cost more: nobody further on can win
                    if best.expected_s <= far_s + cold_s and not here:
                        step += 1  # only who has it nearer than disk can
                        continue
                ahead -= here
                this = self._scales.weigh(
                    mine, state, step, ask, per_capacity, near_elsewhere=near_anywhere
                )
                weighed.append(this)
                step += 1
                if not this.refused and (best is None or this.expected_s < best.expected_s):
                    best = this
                if best is not None and not ahead and best.expected_s <= step * hop_s + cold_s:
                    return best  # nothing but disks is left
            if len(members) > REACH:
                best = self._beyond(adapter, pool, step, ask, weighed, best)
        return best

    def _beyond(
        self,
        adapter: AdapterId,
        pool: Pool,
        step: int,
        ask: Ask,
        weighed: list[Weighed],
        best: Weighed | None,
    ) -> Weighed | None:
        """Those of a large pool that the walk does not reach: who has it near, who is idle."""
        met = set(pool.ring.near(adapter))
        near = (r for r in self._residency.near(adapter) if r not in met and r in pool.members)
        found = [pool.members[replica] for replica in islice(near, _FEW)]
        if best is None:
            found += pool.least_loaded(_FEW, met | ask.tried, claim=ask.claim)
        per_capacity = self._scales.per_capacity(pool)
        holders = self._residency.holders(adapter)
        for mine in found:
            state = holders.get(mine.id)
            if state is None or not mine.serving or mine.id in met:
                continue
            met.add(mine.id)
            this = self._scales.weigh(mine, state, step, ask, per_capacity, near_elsewhere=True)
            weighed.append(this)
            if not this.refused and (best is None or this.expected_s < best.expected_s):
                best = this
        return best

    def _by_their_own_mean(
        self,
        adapter: AdapterId,
        ask: Ask,
        weighed: list[Weighed],
    ) -> Weighed | None:
        """All that were met are at the bound of their pools, or full: compare them among them.

        In a large pool that is a look at all of its holders, if there are any with room at all.
        """
        holders = len(self._residency.holders(adapter))
        if holders <= len(weighed) and not any(w.refused == "bound" for w in weighed):
            return None
        candidates = list(self._all(adapter))
        per_capacity = self._scales.their_mean(candidates, ask)
        if not per_capacity:
            return None
        weighed[:] = self._compare(adapter, candidates, ask, per_capacity)
        free = [one for one in weighed if not one.refused]
        return min(free, key=lambda one: one.expected_s) if free else None

    def _compare(
        self,
        model: Model,
        candidates: Iterable[Candidate],
        ask: Ask,
        per_capacity: float | None = None,
    ) -> list[Weighed]:
        """All of them, under the bounds of their pools or that of a common mean."""
        hops = not (model is None or isinstance(model, Base))
        near = hops and bool(self._residency.near(AdapterId(model or "")))
        return [
            self._scales.weigh(
                mine,
                state,
                step if hops else 0,
                ask,
                self._scales.per_capacity(pool) if per_capacity is None else per_capacity,
                near_elsewhere=near,
            )
            for step, (pool, mine, state) in enumerate(candidates)
        ]

    def _choice(self, adapter: AdapterId, best: Weighed, weighed: list[Weighed]) -> Choice:
        state = best.state
        assert state is not None
        cold, awaited, patience, telling = False, _NONE, 1, weighed
        if best.load_s:
            cold = self._scales.begins_cold(best.mine, state)
            nearer = [
                w for w in weighed if w.refused and w.refused != "tried" and w.load_s < best.load_s
            ]
            if nearer:
                awaited = frozenset([w.mine.id for w in nearer])
                patience = 1 if any(w.refused == "bound" for w in nearer) else WHILE_FULL
        if len(weighed) > 1:
            telling = [
                this
                for this in weighed
                if this is best or this.step == 0 or this.expected_s < best.expected_s
            ]
        kind = kind_of(best, home=weighed[0])
        return Choice(best.mine.id, kind, state.digest, cold, telling, awaited, patience)

    def _no_candidate(self, mine: Replica, model: Model) -> CandidateTerms:
        state = None
        if model is not None and not isinstance(model, Base):
            state = self._residency.holders(model).get(mine.id)
        refused = "absent" if mine.serving else mine.state.value
        tier = None if state is None else state.tier
        return CandidateTerms(
            mine.id, -1, tier, mine.load, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, refused
        )


def _is_base(model: Model) -> bool:
    return model is None or isinstance(model, Base)
