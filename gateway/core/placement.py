"""Who should hold what: k owners an adapter, in host memory before anybody asks.

The host tiers of a fleet are one partitioned cache. From measured popularity, and what a schedule
expects, a cycle of planning assigns

    owners    the first k replicas in the adapter's order (its pools, their rings) that have room:
              host_share of the bytes and places they report; the rest of a host tier is left to
              what requests bring there
    k         load / (grow_share * capacity), at least 1: an adapter grows owners with its load at
              once, and shrinks when it has needed fewer for `cool_s`
    spares    when all have their k, whoever is more popular gets one owner more while room is
              left: where a spill finds the adapter warm

and orders what an owner lacks: a copy into host memory, and for the first of each owner's list, as
many as it has slots, one into a slot that is free. Law: nothing is ever ordered away. A replica's
own LRU, leases and pins decide what leaves. What it could not keep is ordered again at most
`attempts` times, with pauses that double from `retry_s`, and then left alone for as long again. At
most `ahead_max` orders a replica are open.

So a replica that joins gets its adapters before their traffic: requests go where the adapter is,
and move when it has arrived (make before break). One that is to leave counts as absent here while
it still serves; `handed_over` says when everything it has is held elsewhere too.

More popular means a higher power of two: an order that changed with every request would move
adapters for nothing. A cycle is cut into pieces of `piece` adapters, so that no call takes long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from gateway.core.fleet import Fleet, Replica, ReplicaState
from gateway.core.orders import Order as Order
from gateway.core.orders import Orders
from gateway.core.popularity import Expected, Popularity
from gateway.core.residency import ResidencyMap
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, Tier

_UNUSED: Final = -(1 << 30)
_SMOOTHING: Final = 0.3
"""Of the load in flight: a cycle's sample counts this much."""


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """Times in seconds."""

    interval_s: float = 1.0  # between the begins of two cycles
    half_life_s: float = 120.0
    host_share: float = 0.9
    grow_share: float = 0.5
    cool_s: float = 60.0
    spares: int = 1
    ahead_max: int = 16
    retry_s: float = 2.0
    attempts: int = 5
    lead_s: float = 30.0  # a scheduled adapter is brought this long before its time
    handover_s: float = 30.0  # a replica that leaves waits this long for its adapters' new owners
    piece: int = 512


@dataclass(slots=True)
class _Room:
    """What a cycle has left to give at one replica."""

    mine: Replica
    places: float
    bytes: float
    slots: int


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
        self._places: dict[ReplicaId, float] = {}  # that the last cycle began with
        self._scores: dict[AdapterId, float] = {}
        self._total = 0.0
        self._orders: list[Order] = []
        self._cycle: Iterator[None] | None = None
        self._begins_at = -math.inf
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
            hosts = any(_has_host(mine) for mine in self._fleet.replicas.values())
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
        assert all(len(set(owners)) == len(owners) for owners in self._owners.values())
        used: dict[ReplicaId, int] = {}
        for owners in self._owners.values() if self._cycle is None else ():
            for replica in owners:
                used[replica] = used.get(replica, 0) + 1
        for replica, count in used.items():
            assert count <= self._places[replica], f"{replica} owns more than it can hold"

    # -- a cycle

    def _plan(self, now: float) -> Iterator[None]:
        rules = self._rules
        self.popularity.settle(now)
        self._in_flight += _SMOOTHING * (len(self._fleet.leases) - self._in_flight)
        self._book.begin(now)
        rooms = self._rooms()
        self._places = {replica: room.places for replica, room in rooms.items()}
        if not rooms:
            self._owners = {}
            return
        self._capacity = max(1.0, sum(r.mine.capacity for r in rooms.values()) / len(rooms))
        names = self._by_popularity(now)
        owners: dict[AdapterId, list[ReplicaId]] = {}
        done = 0
        for spare in range(rules.spares + 1):
            for _, adapter in names:
                mine = owners.setdefault(adapter, [])
                k = 1 if spare else self._k(adapter, now)
                self._assign(adapter, k, mine, rooms)
                done += 1
                if done % rules.piece == 0:
                    yield
        for level, adapter in names:
            self._order(adapter, owners[adapter], rooms, hot=level > _UNUSED, now=now)
            done += 1
            if done % rules.piece == 0:
                yield
        self._owners = {adapter: tuple(mine) for adapter, mine in owners.items() if mine}

    def _rooms(self) -> dict[ReplicaId, _Room]:
        share = self._rules.host_share
        rooms = {}
        for mine in self._fleet.replicas.values():
            said = mine.said
            if said is None or not _has_host(mine) or not _may_own(mine):
                continue
            rooms[mine.id] = _Room(
                mine,
                math.floor(share * said.host_max) if said.host_max else math.inf,
                share * said.host_bytes if said.host_bytes else math.inf,
                max(0, mine.slots - 1),
            )
        return rooms

    def _by_popularity(self, now: float) -> list[tuple[int, AdapterId]]:
        """(level, adapter), the highest level first."""
        scores = {name: self.popularity.score(name) for name in self.popularity.names()}
        for one in self._expected:
            if one.starts_at - self._rules.lead_s <= now < one.ends_at:
                score = self.popularity.score_of_rate(one.rate_per_s)
                scores[one.adapter] = max(scores.get(one.adapter, 0.0), score)
        self._scores, self._total = scores, self.popularity.total()
        names = self._residency.names()
        levels = {name: math.floor(math.log2(score)) for name, score in scores.items() if score > 0}
        return sorted(((levels.get(name, _UNUSED), name) for name in names), key=_rank)

    def _k(self, adapter: AdapterId, now: float) -> int:
        """Owners that its load needs, now or within the last `cool_s`."""
        score = self._scores.get(adapter, 0.0)
        using = self._fleet.using.get(adapter)
        if not score and using is None:
            self._wanted.pop(adapter, None)
            return 1
        flying = sum(mine.ours[adapter].requests for mine in using.values()) if using else 0
        load = max(self._in_flight * score / max(score, self._total), flying)
        k = max(1, math.ceil(load / (self._rules.grow_share * self._capacity)))
        was, needed_at = self._wanted.get(adapter, (0, now))
        if k < was and now - needed_at < self._rules.cool_s:
            return was
        self._wanted[adapter] = (k, now)
        return k

    def _assign(
        self, adapter: AdapterId, k: int, owners: list[ReplicaId], rooms: dict[ReplicaId, _Room]
    ) -> None:
        """k owners more."""
        holders, size = self._residency.holders(adapter), self._residency.size_bytes(adapter)
        for pool in self._fleet.pools.for_adapter(adapter):
            for replica in pool.ring.near(adapter):
                room = rooms.get(replica)
                if room is None or room.places < 1 or room.bytes < size or replica in owners:
                    continue
                if holders.get(replica) is None:
                    continue
                room.places -= 1
                room.bytes -= size
                owners.append(replica)
                k -= 1
                if not k:
                    return

    def _order(
        self,
        adapter: AdapterId,
        owners: list[ReplicaId],
        rooms: dict[ReplicaId, _Room],
        *,
        hot: bool,
        now: float,
    ) -> None:
        near = self._residency.near(adapter)
        for replica in owners:
            room, state = rooms[replica], near.get(replica)
            wants_slot = hot and room.slots > 0
            room.slots -= wants_slot
            if state is None:
                self._ask(room, adapter, Tier.HOST, now)
            elif wants_slot and _waits_in_host(state) and room.mine.slots_used < room.mine.slots:
                self._ask(room, adapter, Tier.GPU, now)

    def _ask(self, room: _Room, adapter: AdapterId, tier: Tier, now: float) -> None:
        mine = room.mine
        if mine.state is ReplicaState.UP and self._fleet.replicas.get(mine.id) is mine:
            order = self._book.ask(mine.id, adapter, tier, now)
            if order is not None:
                self._orders.append(order)

    def _stays(self, replica: ReplicaId) -> bool:
        mine = self._fleet.replicas.get(replica)
        return mine is not None and mine.serving and mine.leaving_by is None


def _has_host(mine: Replica) -> bool:
    """It says how much of its host memory is for adapters, and so takes orders."""
    said = mine.said
    return said is not None and said.merged is None and bool(said.host_max or said.host_bytes)


def _may_own(mine: Replica) -> bool:
    """It is here to stay; a passing trouble moves no adapter."""
    gone = (ReplicaState.UNKNOWN, ReplicaState.LOST, ReplicaState.DRAINING)
    return mine.state not in gone and mine.leaving_by is None and not mine.draining


def _waits_in_host(state: AdapterState) -> bool:
    return state.tier is Tier.HOST and state.status is AdapterStatus.READY


def _rank(named: tuple[int, AdapterId]) -> tuple[int, AdapterId]:
    return (-named[0], named[1])
