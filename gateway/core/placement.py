"""Who should hold what: k owners an adapter, in host memory before anybody asks.

The host tiers of a fleet are one partitioned cache. From measured popularity, and what a schedule
expects, a cycle of planning assigns

    owners    the first k replicas in the adapter's order (its pools, their rings) that have room:
              host_share of the bytes and places they report; the rest of a host tier is left to
              what requests bring there
    k         load / (grow_share * capacity), at least 1: an adapter grows owners with its load at
              once, and shrinks when it has needed fewer for `cool_s`
    spares    once all have their k, whoever gains most by one owner more gets it, while room is
              left, at most `spares` each: where a spill finds the adapter warm. An owner is at its
              bound for one request in four or so, so each spare is worth a quarter of the last

and orders what an owner lacks: a copy into host memory, and for the first of each owner's list, as
many as it has slots, one into a slot that is free. Law: nothing is ever ordered away. A replica's
own LRU, leases and pins decide what leaves; an order for host memory only says of everything that
is owned there that it is wanted now, which puts what is not wanted at the LRU's end; that is said
every `keep_s` at least. What a replica could not keep is ordered again at most `attempts` times in
a row (gateway/core/orders.py).

So a replica that joins gets its adapters before their traffic: requests go where the adapter is,
and move when it has arrived (make before break). One that is to leave counts as absent here while
it still serves; `handed_over` says when everything it has is held elsewhere too.

More popular means a higher level, a power of two that an adapter leaves only when its score is well
outside: an order that changed with every request would move adapters for nothing. A cycle is cut
into pieces of `piece` adapters, so that no call takes long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from gateway.core.fleet import Fleet, Replica, ReplicaState
from gateway.core.orders import Order as Order
from gateway.core.orders import Orders
from gateway.core.partition import UNUSED, Partition, Room, has_host
from gateway.core.popularity import Expected, Popularity
from gateway.core.residency import ResidencyMap
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, Tier

_STICKY: Final = 0.7
"""Powers of two that a score may be outside its level before the level follows."""

_SMOOTHING: Final = 0.3
"""Of the load in flight: a cycle's sample counts this much."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """Times in seconds."""

    interval_s: float = 1.0  # between the begins of two cycles
    half_life_s: float = 300.0
    host_share: float = 0.9
    grow_share: float = 0.5
    cool_s: float = 60.0
    spares: int = 8
    ahead_max: int = 16
    retry_s: float = 2.0
    attempts: int = 5
    keep_s: float = 10.0
    lead_s: float = 30.0  # a scheduled adapter is brought this long before its time
    handover_s: float = 30.0  # a replica that leaves waits this long for its adapters' new owners
    piece: int = 512


class Placement:
    def __init__(self, *, fleet: Fleet, residency: ResidencyMap, rules: PlacementRules) -> None:
        self._fleet = fleet
        self._residency = residency
        self._rules = rules
        self.popularity: Final = Popularity(half_life_s=rules.half_life_s)
        self._expected: tuple[Expected, ...] = ()
        self._owners: dict[AdapterId, tuple[ReplicaId, ...]] = {}
        self._wanted: dict[AdapterId, tuple[int, float]] = {}  # k, and when it last was needed
        self._book: Final = Orders(
            residency=residency,
            ahead_max=rules.ahead_max,
            retry_s=rules.retry_s,
            attempts=rules.attempts,
        )
        self._in_flight = 0.0  # smoothed
        self._capacity = 1.0  # of an owner, on average
        self._partition: Partition | None = None  # of the last cycle, or of the one under way
        self._scores: dict[AdapterId, float] = {}
        self._total = 0.0
        self._levels: dict[AdapterId, int] = {}
        self._orders: list[Order] = []
        self._keep_at: dict[ReplicaId, float] = {}  # when its owned are to be named again
        self._cycle: Iterator[None] | None = None
        self._begins_at = -math.inf
        self.moves = 0
        """Owners that adapters which had some got in place of others, or beside them."""
        self.due = math.inf
        """When `advance` has something to do; infinite while no replica has host memory to plan."""

    # -- events

    def expect(self, expected: Iterable[Expected]) -> None:
        """The whole schedule, in place of the one before."""
        self._expected = tuple(expected)

    def stir(self, now: float) -> None:
        """The fleet has changed: begin a cycle soon, at most every half interval."""
        if self._cycle is None:
            self.due = min(self.due, max(now, self._begins_at + self._rules.interval_s / 2))

    # -- decisions

    def advance(self, now: float) -> list[Order]:
        """A piece of a cycle, when it is due."""
        if now < self.due:
            return []
        orders: list[Order] = []
        self._orders = orders
        if self._cycle is None:
            self._begins_at = now
            self._cycle = self._plan(now)
        if next(self._cycle, self) is not self:
            self.due = now  # there is more
        else:
            self._cycle = None
            hosts = any(has_host(mine) for mine in self._fleet.replicas.values())
            self.due = self._begins_at + self._rules.interval_s if hosts else math.inf
        return orders

    def handed_over(self, leaving: Replica) -> bool:
        """Whatever it has near, and somebody used lately, is near on another that stays."""
        return all(
            any(self._stays(replica) for replica in self._residency.near(adapter))
            for adapter in self._residency.near_of(leaving.id)
            if self.popularity.score(adapter) or adapter in self._fleet.using
        )

    # -- questions

    def owners(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """As of the last cycle, first in its order first."""
        return self._owners.get(adapter, ())

    def check(self) -> None:
        self.popularity.check()
        self._book.check()
        if self._cycle is None and self._partition is not None:
            self._partition.check()

    # -- a cycle

    def _plan(self, now: float) -> Iterator[None]:
        rules = self._rules
        self.popularity.settle(now)
        self._in_flight += _SMOOTHING * (len(self._fleet.leases) - self._in_flight)
        self._book.begin(now)
        self._partition = parts = Partition(
            fleet=self._fleet, residency=self._residency, host_share=rules.host_share
        )
        rooms = parts.rooms
        self._keep_at = {replica: at for replica, at in self._keep_at.items() if replica in rooms}
        self._capacity = sum(room.mine.capacity for room in rooms.values()) / max(1, len(rooms))
        names = self._by_popularity(now) if rooms else []
        for done, (_, adapter) in enumerate(names, 1):
            parts.assign(adapter, self._k(adapter, now))
            if not done % rules.piece:
                yield
        for done, _ in enumerate(parts.spare(names, rules.spares), 1):
            if not done % rules.piece:
                yield
        owners = {adapter: tuple(mine) for adapter, mine in parts.owners.items() if mine}
        self.moves += sum(map(self._moved, owners.items()))
        self._owners = owners
        done = 0
        for room in rooms.values():
            self._order(room, now)
            done += len(room.owned)
            if done >= rules.piece:
                done = 0
                yield

    def _moved(self, now: tuple[AdapterId, tuple[ReplicaId, ...]]) -> int:
        """New owners of one adapter, since the cycle before."""
        was = self._owners.get(now[0])
        return 0 if was is None or was == now[1] else len(set(now[1]).difference(was))

    def _by_popularity(self, now: float) -> list[tuple[int, AdapterId]]:
        """(level, adapter), the highest level first."""
        scores = {name: self.popularity.score(name) for name in self.popularity.names()}
        for one in self._expected:
            if one.starts_at - self._rules.lead_s <= now < one.ends_at:
                score = self.popularity.score_of_rate(one.rate_per_s)
                scores[one.adapter] = max(scores.get(one.adapter, 0.0), score)
        self._scores, self._total = scores, self.popularity.total()
        names = self._residency.names()
        levels = {name: self._level(name, score) for name, score in scores.items() if score > 0}
        self._levels = levels
        return sorted(((levels.get(name, UNUSED), name) for name in names), key=_rank)

    def _level(self, adapter: AdapterId, score: float) -> int:
        exact, was = math.log2(score), self._levels.get(adapter)
        if was is not None and was - _STICKY <= exact < was + 1 + _STICKY:
            return was
        return math.floor(exact)

    def _k(self, adapter: AdapterId, now: float) -> int:
        """Owners that its load needs, now or within the last `cool_s`."""
        score = self._scores.get(adapter, 0.0)
        using = self._fleet.using.get(adapter)
        if not score and using is None:
            self._wanted.pop(adapter, None)
            return 1
        flying = sum(mine.ours[adapter].requests for mine in using.values()) if using else 0
        load = max(self._in_flight * score / max(score, self._total), flying)
        k = max(1, math.ceil(load / (self._rules.grow_share * max(1.0, self._capacity))))
        was, needed_at = self._wanted.get(adapter, (0, now))
        if k < was and now - needed_at < self._rules.cool_s:
            return was
        self._wanted[adapter] = (k, now)
        return k

    def _order(self, room: Room, now: float) -> None:
        mine = room.mine
        if mine.state is not ReplicaState.UP or self._fleet.replicas.get(mine.id) is not mine:
            return
        lacking: list[AdapterId] = []
        for adapter in room.owned:
            here = mine.id in self._residency.near(adapter)
            if not here and self._book.ask(mine.id, adapter, Tier.HOST, now):
                lacking.append(adapter)
        if lacking or now >= self._keep_at.get(mine.id, 0.0):
            self._keep_at[mine.id] = now + self._rules.keep_s
            held = [name for name in room.owned if mine.id in self._residency.near(name)]
            if held or lacking:
                self._orders.append(Order(mine.id, Tier.HOST, (*reversed(held), *lacking)))
        free = mine.slots - mine.slots_used
        if free > 0:
            self._order_slots(room, free, now)

    def _order_slots(self, room: Room, free: int, now: float) -> None:
        """The most wanted that wait in host memory, while slots are free."""
        replica = room.mine.id
        wanted: list[AdapterId] = []
        for adapter in room.owned[: room.mine.slots]:
            state = self._residency.near(adapter).get(replica)
            if state is None or not _waits_in_host(state) or not self._scores.get(adapter):
                continue
            if len(wanted) < free and self._book.ask(replica, adapter, Tier.GPU, now):
                wanted.append(adapter)
        if wanted:
            self._orders.append(Order(replica, Tier.GPU, tuple(wanted)))

    def _stays(self, replica: ReplicaId) -> bool:
        mine = self._fleet.replicas.get(replica)
        return mine is not None and mine.serving and mine.leaving_by is None


def _waits_in_host(state: AdapterState) -> bool:
    return state.tier is Tier.HOST and state.status is AdapterStatus.READY


def _rank(named: tuple[int, AdapterId]) -> tuple[int, AdapterId]:
    return (-named[0], named[1])
