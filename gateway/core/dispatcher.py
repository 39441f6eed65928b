"""The one writer of the gateway's state: events in, decisions out, nothing awaited in between.

    arrive -> queued -> (poll: Dispatch) -> in flight -> finish
                 \\-> Reject at the door, Evict from the queue        cancel ends either

Every request is in exactly one place, and has at most one outcome:

    arrived = queued + in flight + finished + refused + cancelled

`poll` hands out places while some replica has one: the fair queue says whose turn it is, the
reserve whether a replica's last ones are for it, the router where to. A head that cannot be placed
is passed over, its line parked until something happens that could help: a place comes free on a
replica that serves it, a report brings its adapter nearer. A head that would start a load from
disk, while a replica that has its adapter is merely busy, is passed over too, for at most
`warm_wait_s` from its first turn (`Choice.patience` times as long while that replica is full): a
short wait beats a long load. So a poll costs its decisions and the lines that an event has touched,
and leaves only such waiting.

What no replica could take even after waiting is refused at once, not held until its time is up.
"""

from __future__ import annotations

import math
from typing import Final

from gateway.core.breaker import HealthRules
from gateway.core.cost import Cost
from gateway.core.decisions import Arrival as Arrival
from gateway.core.decisions import Decision as Decision
from gateway.core.decisions import Dispatch as Dispatch
from gateway.core.decisions import Evict as Evict
from gateway.core.decisions import Placement as Placement
from gateway.core.decisions import Reject as Reject
from gateway.core.decisions import RejectReason as RejectReason
from gateway.core.decisions import ReplicaView as ReplicaView
from gateway.core.fleet import Conduct as Conduct
from gateway.core.fleet import ReplicaState as ReplicaState
from gateway.core.fleet import Verdict as Verdict
from gateway.core.health import Standing as Standing
from gateway.core.membership import Membership
from gateway.core.placement import Order as Order
from gateway.core.placement import PlacementRules as PlacementRules
from gateway.core.reserve import NONE
from gateway.core.router import Base as Base
from gateway.core.router import CandidateTerms as CandidateTerms
from gateway.core.router import Choice
from gateway.core.router import Kind as Kind
from gateway.core.waiting_room import Ticket, WaitingRoom
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId

_UNTRIED: Final[frozenset[ReplicaId]] = frozenset()


class Dispatcher(Membership):
    def __init__(
        self,
        *,
        load_factor: float,
        load_floor: int,
        load_floor_share: float = 0.0,
        vnodes: int,
        service_s: float,
        host_load_s: float,
        disk_load_s: float,
        hop_s: float,
        per_tenant_max: int,
        ttl_s: float,
        input_weight: float,
        output_weight: float,
        warm_wait_s: float,
        silence_heartbeats: float,
        reserve_share: float = 0.0,
        reserve_for_s: float = 0.0,
        health: HealthRules | None = None,
        placement: PlacementRules | None = None,
    ) -> None:
        """`placement` None: adapters are where requests bring them."""
        super().__init__(
            vnodes=vnodes,
            service_s=service_s,
            silence_heartbeats=silence_heartbeats,
            rules=health or HealthRules(),
            load_factor=load_factor,
            load_floor=load_floor,
            load_floor_share=load_floor_share,
            host_load_s=host_load_s,
            disk_load_s=disk_load_s,
            hop_s=hop_s,
            warm_wait_s=warm_wait_s,
            placement=placement,
            reserve_share=reserve_share,
        )
        self._room = WaitingRoom(ttl_s=ttl_s, reserve_for_s=reserve_for_s if reserve_share else 0.0)
        self._cost = Cost(input_weight, output_weight)
        self._per_tenant_max = per_tenant_max
        self._warm_wait_s = warm_wait_s
        self._in_flight: dict[RequestId, Ticket] = {}
        self._leaving, self.verdicts = {}, []
        self._refusals: list[Decision] = []
        self.arrived = self.finished = self.refused = self.cancelled = 0

    # -- events: requests

    def arrive(self, arrival: Arrival, now: float) -> None:
        """Queue it, or refuse it in the next poll."""
        request = arrival.request
        assert request not in self._room, f"{request} arrived twice"
        assert request not in self._in_flight, f"{request} arrived twice"
        self.arrived += 1
        self._room.asked(arrival.tenant, now)
        if not self._router.hope(arrival.model, frozenset()):
            self._refuse(Reject(request, self._hopeless(arrival.adapter)))
            return
        fits = self._room.enter(
            self._ticket(arrival, now),
            waiting_max=self._per_tenant_max if arrival.queue_max is None else arrival.queue_max,
        )
        if not fits:
            self._refuse(Reject(request, RejectReason.QUEUE_FULL))

    def place(self, arrival: Arrival, now: float) -> Dispatch | None:
        """`arrive` and `poll` in one while nobody waits, at a third of the cost.

        None: nothing is decided, and it has to arrive. Law: the decision, and all that follows,
        is what `arrive` and `poll` would give.
        """
        if not self.quiet or arrival.queue_max == 0:
            return None
        self._room.asked(arrival.tenant, now)
        claim = self._claim(arrival.tenant, now)
        choice = self._router.pick(arrival.model, _UNTRIED, now, claim=claim)
        if choice is None or (choice.cold and choice.awaited):
            return None
        ticket = self._ticket(arrival, now)
        self.arrived += 1
        self._room.pass_through(ticket)
        return self._begin(ticket, choice, now)

    @property
    def quiet(self) -> bool:
        """Nobody waits and nothing is to be told: a poll would decide nothing."""
        return not (self._room or self._refusals or self.verdicts or self._fleet.health.news)

    def cancel(self, request: RequestId, now: float) -> None:
        """The client left: no decision follows. In flight it ends, at the cost estimated."""
        if self._room.leave(request):
            self.cancelled += 1
        else:
            self.finish(request, None, None, now)

    def reroute(
        self, request: RequestId, failed: ReplicaId, now: float, *, conduct: Conduct | None
    ) -> None:
        """It failed before the first byte: back to the front, never there again.

        GONE (no answer at all) stops all dispatch there until its next report.
        """
        if (ticket := self._in_flight.pop(request, None)) is not None:
            self._note_room(self._fleet.finish(request, now, conduct))
            self._room.come_back(ticket, failed, now)
            self._shrunk = True

    def answered(self, request: RequestId, now: float) -> bool:
        """The first token of one that streams. True: it passed a trial, so a poll is due."""
        self._fleet.answered(request, now)
        return bool(self._fleet.health.news)

    def finish(
        self,
        request: RequestId,
        input_tokens: int | None,
        output_tokens: int | None,
        now: float,
        conduct: Conduct | None = None,
    ) -> None:
        """The lease ends: its place is free, its tenant is charged what it really cost.

        None keeps the estimate; `conduct` is its replica's, None when it is not known. Harmless
        for a request that is not in flight.
        """
        ticket = self._in_flight.pop(request, None)
        if ticket is None:
            return
        self._note_room(self._fleet.finish(request, now, conduct))
        was = ticket.arrival
        inputs = was.input_tokens if input_tokens is None else input_tokens
        outputs = was.output_tokens if output_tokens is None else output_tokens
        self._room.settle(ticket, self._cost.of(inputs, outputs))
        self.finished += 1

    # -- decisions

    def poll(self, now: float) -> list[Decision]:
        """All that can be decided now, refusals first."""
        for replica in self._fleet.silence.silent(now):
            self.replica_lost(replica, now)
        for replica in self._fleet.health.advance(now):
            self._note_room(replica)
        self._heed()
        for request in self._room.expired(now):
            self._evict(request, RejectReason.EXPIRED)
        if self._shrunk:
            self._shrunk = False
            for ticket in self._room.hopeless(lambda key: self._router.hope(*key)):
                self._evict(ticket.arrival.request, self._hopeless(ticket.arrival.adapter))
        self._room.wake(now)
        decisions, self._refusals = self._refusals, []
        while (head := self._turn(now)) is not None:
            if (dispatch := self._place(head, now)) is not None:
                decisions.append(dispatch)
        return decisions

    def next_wakeup(self, now: float) -> float | None:
        """When to poll, and ask for orders, although nothing happens: never late, at times early;
        `now`: at once."""
        turn = self._turn(now) is not None
        if self._refusals or self._shrunk or turn or self._fleet.health.news:
            return now
        fleet_due = min(self._fleet.silence.due, self._fleet.health.due)
        first = min(fleet_due, self._room.next_wakeup(now), self._orders_due())
        return first if first < math.inf else None

    # -- questions

    @property
    def queued(self) -> int:
        return len(self._room)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def waiting(self, tenant: TenantId) -> int:
        """How many of the tenant's requests are queued."""
        return self._room.waiting(tenant)

    def check(self) -> None:
        for part in (self._residency, self._fleet, self._room, self._placement):
            if part is not None:
                part.check()
        ended = self.finished + self.refused + self.cancelled
        assert self.arrived == self.queued + self.in_flight + ended
        assert not any(request in self._room for request in self._in_flight)
        assert self._fleet.leases == self._in_flight.keys()

    # -- inside

    def _ticket(self, arrival: Arrival, now: float) -> Ticket:
        cost = self._cost.of(arrival.input_tokens, arrival.output_tokens)
        return Ticket(arrival, cost, arrived_at=now, entered_at=now)

    def _turn(self, now: float) -> Ticket | None:
        """Whose turn it is, while some replica has a place for it, or for somebody behind it."""
        if not self._fleet.open or (head := self._room.first()) is None:
            return None
        if self._fleet.roomy or self._claim(head.arrival.tenant, now) < NONE:
            return head
        return None if self._fleet.open <= self._router.could_take(*head.key) else head

    def _place(self, ticket: Ticket, now: float) -> Dispatch | None:
        """Send the head whose turn it is, or pass it over."""
        key, claim = ticket.key, self._claim(ticket.arrival.tenant, now)
        stuck = self._room.stuck(ticket, claim)
        if stuck or (choice := self._router.pick(*key, now, claim=claim)) is None:
            could = self._router.could_take(*key)
            kept = self._fleet.keep(could, self._room.turn)
            self._room.pass_over(ticket, could, kept=kept)
            return None
        if choice.cold and choice.awaited:
            until = ticket.patient_until(now, self._warm_wait_s * choice.patience)
            if now < until:
                self._fleet.keep(choice.awaited, self._room.turn)
                self._room.pass_over(ticket, choice.awaited, until)
                return None
        self._room.send(ticket)
        return self._begin(ticket, choice, now)

    def _begin(self, ticket: Ticket, choice: Choice, now: float) -> Dispatch:
        arrival, request = ticket.arrival, ticket.arrival.request
        self._fleet.begin(request, choice.replica, arrival.adapter, now, streams=arrival.streams)
        self._in_flight[request] = ticket
        if self._placement is not None:
            self._placement.popularity.used(arrival.adapter)
        said = self._fleet.replicas[choice.replica].said
        boot = "" if said is None else said.boot
        return Dispatch(request, Placement(choice, now - ticket.arrived_at, boot))

    def _hopeless(self, adapter: AdapterId | None) -> RejectReason:
        """While a replica has yet to say what it serves, no adapter is unknown."""
        known = adapter is None or self._residency.knows(adapter) or self._fleet.incomplete
        return RejectReason.NO_REPLICA if known else RejectReason.UNKNOWN_MODEL

    def _evict(self, request: RequestId, why: RejectReason) -> None:
        self._room.leave(request)
        self._refuse(Evict(request, why))

    def _refuse(self, refusal: Reject | Evict) -> None:
        self.refused += 1
        self._refusals.append(refusal)
