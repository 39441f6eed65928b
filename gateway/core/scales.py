"""The scales: what one candidate costs, and the bound that it must stay under.

    expected_s = queue_s    (load + 1 - capacity) places to wait for, at service_s each
               + load_s     0 in a slot; from host memory or disk its bytes at the rate that the
                            replica measured, or host_load_s and disk_load_s before it has; what is
                            left of it when the load is under way (reported, or begun by us)
               + slot_s     service_s per adapter too many, when running and pinned ones hold
                            all slots
               + hop_s      hop_s per step from home: so ties go home, and no difference smaller
                            than a step makes an adapter ping-pong
               + crowd_s    disk_load_s * u ** 3, u = (load - floor) / (bound - floor): the price
                            of a scarce place
               + cold_s     disk_load_s + warm_wait_s (at least disk_load_s again) when a load from
                            disk would begin here while another has the adapter nearer: a second
                            copy displaces a first one, whose next request then loads it, and it is
                            worth a scarce place elsewhere, or as long a wait there as in the line

The first three are the time to the first token; what follows is what the choice takes from others.
Prices that grow steeply towards the bound are those of online load balancing (Aspnes, Azar, Fiat,
Plotkin & Waarts, 1997): the last places belong to adapters that have no other owner, so those with
several leave them while they can.

    floor = max(load_floor, ceil(load_floor_share * capacity))
    bound = max(floor, floor of load_factor * mean * capacity, ceil of mean * capacity)

A merged replica has its own bound: all its places.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, inf

from gateway.core.fleet import Replica
from gateway.core.pool import Pool
from gateway.core.residency import ResidencyMap
from gateway.core.terms import Ask, Weighed
from shared.messages import AdapterState, AdapterStatus, Tier

_EPSILON = 1e-9
_GPU, _DISK = Tier.GPU, Tier.DISK  # to ask an enum for a member costs as much as a call
_READY, _LOADING = AdapterStatus.READY, AdapterStatus.LOADING

Candidate = tuple[Pool, Replica, AdapterState | None]


class Scales:
    def __init__(
        self,
        *,
        residency: ResidencyMap,
        load_factor: float,
        load_floor: int,
        load_floor_share: float,
        host_load_s: float,
        disk_load_s: float,
        hop_s: float,
        warm_wait_s: float,
    ) -> None:
        self._residency = residency
        self._load_factor = load_factor
        self._bound = lru_cache(256)(
            lambda share: max(int(share + _EPSILON), ceil(share / load_factor - _EPSILON))
        )
        self._floor = lru_cache(256)(lambda size: max(load_floor, ceil(load_floor_share * size)))
        self._assumed_s = {Tier.GPU: 0.0, Tier.HOST: host_load_s, Tier.DISK: disk_load_s}
        self.hop_s = hop_s
        self.disk_load_s = disk_load_s
        self._cold_s = disk_load_s + max(disk_load_s, warm_wait_s)
        self.second_copy_s = disk_load_s + self._cold_s

    def per_capacity(self, pool: Pool) -> float:
        if pool.key.merged is not None:
            return inf
        return self._load_factor * (pool.load + 1) / pool.capacity if pool.capacity else 0.0

    def their_mean(self, candidates: Iterable[Candidate], ask: Ask) -> float:
        load, capacity = 1, 0
        for _, mine, _ in candidates:
            if mine.load < mine.places(ask.claim) and mine.id not in ask.tried:
                load += mine.load
                capacity += mine.capacity
        return self._load_factor * load / capacity if capacity else 0.0

    def of_base(self, pool: Pool, mine: Replica, *, light: bool) -> tuple[bool, int, float]:
        """What orders replicas for the base model: load, after prompts to read for who holds little
        and has a place at once on more than one."""
        if not light:
            return False, 0, mine.busy
        crowded = mine.busy >= min(1.0, self.per_capacity(pool))
        return crowded, len(mine.pace.waiting), mine.busy

    def weigh(
        self,
        mine: Replica,
        state: AdapterState | None,
        step: int,
        ask: Ask,
        per_capacity: float,
        *,
        near_elsewhere: bool = False,
    ) -> Weighed:
        load, capacity, limit = mine.load, mine.capacity, mine.limit
        floor = bound = limit
        if per_capacity != inf:
            floor = bound = self._floor(capacity)
            if (share := per_capacity * capacity) > floor:
                bound = self._bound(share)
        if mine.id in ask.tried:
            refused = "tried"
        elif load >= mine.places(ask.claim):
            refused = "full" if load >= limit else "kept"
        else:
            refused = "bound" if load >= bound else ""
        queue_s = (load + 1 - capacity) * mine.service_s if load >= capacity else 0.0
        load_s = slot_s = cold_s = crowd_s = 0.0
        if state is not None:
            if state.tier is not _GPU or state.status is not _READY:
                load_s, since = self._load_s(mine, state), self._since(mine, state)
                if since is not None:
                    load_s = max(0.0, load_s - max(0.0, ask.now - since))
                else:
                    slot_s = mine.slots_short() * mine.service_s
                    if near_elsewhere and load_s and state.tier is _DISK:
                        cold_s = self._cold_s
            if load > floor:
                crowd_s = self.disk_load_s * min(1.0, (load - floor) / max(1, bound - floor)) ** 3
        hop_s = step * self.hop_s
        return Weighed(
            queue_s + load_s + slot_s + hop_s + crowd_s + cold_s,
            refused,
            mine,
            state,
            step,
            load,
            bound if bound < limit else limit,
            queue_s,
            load_s,
            slot_s,
            hop_s,
            crowd_s,
            cold_s,
        )

    def begins_cold(self, mine: Replica, state: AdapterState) -> bool:
        """A request there would start a load from disk, not join one."""
        return state.tier is _DISK and self._since(mine, state) is None

    def _load_s(self, mine: Replica, state: AdapterState) -> float:
        """Of a whole load, from where it is."""
        said, size = mine.said, state.size_bytes
        if said is None or not size or not said.copy_bytes_per_s:
            return self._assumed_s[state.tier]
        copy_s = size / said.copy_bytes_per_s
        if state.tier is not _DISK:
            return copy_s
        if not said.read_bytes_per_s:
            return self.disk_load_s
        return copy_s + size / said.read_bytes_per_s

    def _since(self, mine: Replica, state: AdapterState) -> float | None:
        """When its load began there: as reported, or for a request of ours."""
        if state.status is _LOADING:
            return self._residency.loading_since(mine.id, state.adapter)
        use = mine.ours.get(state.adapter)
        return use.since if use is not None else None
