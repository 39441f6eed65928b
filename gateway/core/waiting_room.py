"""Requests that wait: whose turn it is, what they wait for, and when they have waited too long.

The fair queue orders them, the reserve says who may have a replica's last places, the parking
remembers what passed-over lines wait for, and the order of entry is the order of expiry, since all
have the same time to live. A request that comes back from a failed replica enters anew: its time
there was not a wait in the queue.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gateway.core.decisions import Arrival
from gateway.core.fair_queue import FairQueue
from gateway.core.parking import Key, Parking
from gateway.core.reserve import NONE, Reserve
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId

LAG_MAX: Final = 65_536.0
"""Cost units that a passed-over tenant may be owed: two of the largest usual requests."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request from its arrival to its end, and where it has been tried."""

    arrival: Arrival
    cost: float  # as estimated
    arrived_at: float
    entered_at: float  # the waiting room, last
    tried: frozenset[ReplicaId] = frozenset()
    first_turn_at: float | None = None  # when it could first have been sent, but far

    def patient_until(self, now: float, wait_s: float) -> float:
        """A wait for a better place ends then. One that a replica sent back has waited enough."""
        if self.tried:
            return now
        if self.first_turn_at is None:
            self.first_turn_at = now
        return self.first_turn_at + wait_s

    @property
    def key(self) -> Key:
        return (self.arrival.model, self.tried)


class WaitingRoom:
    def __init__(self, *, ttl_s: float, reserve_for_s: float) -> None:
        self._ttl_s = ttl_s
        self._reserve = Reserve(for_s=reserve_for_s)
        self._queue: FairQueue[Key] = FairQueue(lag_max=LAG_MAX)
        self._parking = Parking()
        self._tickets: OrderedDict[RequestId, Ticket] = OrderedDict()  # by entry
        self._freed: set[ReplicaId] = set()
        self._nearer: set[AdapterId] = set()

    @property
    def gap(self) -> float:
        """Of service between tenants that wait, in weighted tokens for a weight of 1."""
        return self._queue.gap

    @property
    def turn(self) -> float:
        """The tag of `first`."""
        return self._queue.turn

    def fairness(self) -> float:
        return self._queue.fairness()

    # -- in and out

    def enter(self, ticket: Ticket, *, waiting_max: int) -> bool:
        """False when its tenant has that many waiting already."""
        arrival = ticket.arrival
        fits = self._queue.push(
            arrival.request,
            tenant=arrival.tenant,
            weight=arrival.weight,
            key=ticket.key,
            cost=ticket.cost,
            waiting_max=waiting_max,
        )
        if fits:
            self._tickets[arrival.request] = ticket
        return fits

    def pass_through(self, ticket: Ticket) -> None:
        """`enter` and `send` of one that finds nobody waiting."""
        arrival = ticket.arrival
        self._queue.pass_through(
            arrival.request,
            tenant=arrival.tenant,
            weight=arrival.weight,
            key=ticket.key,
            cost=ticket.cost,
        )
        self._reserve.began(arrival.tenant, arrival.weight, ticket.cost)

    def come_back(self, ticket: Ticket, failed: ReplicaId, now: float) -> None:
        """From the replica that failed it, to the front of its tenant, whatever the bound."""
        ticket.tried |= {failed}
        ticket.entered_at = now
        self._reserve.ended(ticket.arrival.tenant, ticket.cost)
        self._queue.requeue(ticket.arrival.request, ticket.key)
        self._tickets[ticket.arrival.request] = ticket

    def first(self) -> Ticket | None:
        """The head whose turn it is, of the lines that are not passed over."""
        head = self._queue.first()
        return None if head is None else self._tickets[head]

    def send(self, ticket: Ticket) -> None:
        """The first leaves for a replica; its tenant is charged the estimate."""
        arrival = ticket.arrival
        self._queue.pop(arrival.request)
        self._reserve.began(arrival.tenant, arrival.weight, ticket.cost)
        del self._tickets[arrival.request]

    def settle(self, ticket: Ticket, actual: float) -> None:
        """One that was sent has ended, and really cost this much."""
        self._reserve.ended(ticket.arrival.tenant, ticket.cost)
        self._queue.settle(ticket.arrival.request, actual)

    def leave(self, request: RequestId) -> bool:
        """Uncharged. False when it does not wait here."""
        if self._tickets.pop(request, None) is None:
            return False
        self._queue.remove(request)
        return True

    # -- several gateways

    def take_served(self) -> dict[TenantId, float]:
        """What each tenant really cost since this was last asked."""
        return self._queue.take_served()

    def running(self) -> dict[TenantId, float]:
        return self._queue.running()

    def served_elsewhere(self, tenant: TenantId, served: float, running: float) -> None:
        self._queue.served_elsewhere(tenant, served, running)
        self._reserve.elsewhere(tenant, running)

    # -- the reserve

    def asked(self, tenant: TenantId, now: float) -> None:
        self._reserve.asked(tenant, now)

    def claim(self, tenant: TenantId, now: float) -> float:
        """Of the tenant whose turn it is, or of anyone while nobody waits."""
        return self._reserve.claim(tenant, self._queue.turn, now, waiting=len(self._queue))

    # -- passing over

    def stuck(self, ticket: Ticket, claim: float) -> bool:
        """Nobody of its key with no better claim can be placed until something happens."""
        return self._parking.stuck(ticket.key, claims=claim < NONE)

    def pass_over(
        self,
        ticket: Ticket,
        wanted: frozenset[ReplicaId],
        until: float | None = None,
        *,
        kept: bool = False,
    ) -> None:
        """Until a wanted replica has a place more, its adapter comes nearer, or until `until`.

        `kept`: one of them has room, but not for it.
        """
        key = ticket.key
        if until is None:
            self._parking.stick(key, wanted, kept=kept)
        else:
            self._parking.be_patient(key, wanted, until)
        self._queue.park(ticket.arrival.tenant, key)

    def note_room(self, replica: ReplicaId) -> None:
        self._freed.add(replica)

    def note_nearer(self, adapters: Iterable[AdapterId]) -> None:
        self._nearer.update(adapters)

    def wake(self, now: float) -> None:
        """Offer again every line that has seen what it waits for."""
        opened = self._reserve.opened(now, waiting=len(self._queue))
        if self._parking:
            for key in self._parking.wake(self._freed, self._nearer, now, opened=opened):
                self._queue.unpark(key)
        self._freed.clear()
        self._nearer.clear()

    # -- time and hope

    def expired(self, now: float) -> list[RequestId]:
        """Those that have waited their time."""
        gone = []
        for request, ticket in self._tickets.items():
            if now < ticket.entered_at + self._ttl_s:
                break
            gone.append(request)
        return gone

    def hopeless(self, hope: Callable[[Key], bool]) -> list[Ticket]:
        """Those of every key for which there is no hope; one question a key."""
        keys = [key for key in self._queue.all_keys() if not hope(key)]
        return [self._tickets[request] for key in keys for request in self._queue.of_key(key)]

    def next_wakeup(self, now: float) -> float:
        """When somebody's patience or time ends; `now` when somebody has what it waits for."""
        opens = self._reserve.opens(now, waiting=len(self._queue))
        if self._parking and (self._freed or self._nearer or opens):
            return now
        first = next(iter(self._tickets.values()), None)
        expiry = first.entered_at + self._ttl_s if first is not None else math.inf
        lapse = self._reserve.due if first is not None else math.inf
        return min(expiry, lapse, self._parking.next_moment())

    # -- questions

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._tickets

    def waiting(self, tenant: TenantId) -> int:
        return self._queue.waiting(tenant)

    def check(self) -> None:
        self._queue.check()
        self._parking.check()
        self._reserve.check()
        assert len(self._queue) == len(self._tickets)
        entered = [ticket.entered_at for ticket in self._tickets.values()]
        assert entered == sorted(entered), "expiry is out of order"
