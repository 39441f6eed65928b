"""The fleet's part of the dispatcher: what comes and goes, and whom that helps or hurts.

A change can give those who wait a place, or bring an adapter nearer (`_room` is told which), or
leave something served by fewer (`_shrunk`): then the next poll looks for requests without hope.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.core.health import Standing, Verdict
from gateway.core.outlook import Outlook
from gateway.core.placement import Order
from gateway.core.popularity import Expected
from gateway.core.replica import Replica
from gateway.core.reserve import FIRST, NONE
from gateway.core.waiting_room import WaitingRoom
from shared.ids import ReplicaId, TenantId
from shared.messages import AdapterState, ReplicaReport


class Membership(Outlook):
    _room: WaitingRoom  # made by the dispatcher
    _shrunk = False  # something is served by fewer
    _leaving: dict[ReplicaId, Replica]  # likewise: to be drained soon, or were
    verdicts: list[Verdict]  # likewise
    """Who was ejected, tried and readmitted; the reader empties it."""

    def replica_added(self, replica: ReplicaId, now: float) -> None:
        """It takes requests from its first report on."""
        self._fleet.add(replica, now)

    def replica_removed(self, replica: ReplicaId, now: float) -> None:
        """Out of the ring for good: its adapters move. Its requests in flight may still end."""
        self._fleet.remove(replica, now)
        self._residency.forget(replica)
        self._shrunk = True
        self._stir(now)

    def report(self, report: ReplicaReport, now: float) -> bool:
        """False when it changed nothing: stale, repeated, or of a replica that was not added."""
        replica = self._fleet.replicas.get(report.replica)
        if replica is None or (change := self._residency.apply(report, now)) is None:
            return False
        was_open, was_roomy, was = replica.open, replica.roomy, replica.state
        self._fleet.report(report, now)
        self._fleet.health.judge(now)
        if not was_open or (replica.roomy and not was_roomy):
            self._note_room(report.replica)
        self._room.note_nearer(change.gained)
        if change.gained or change.gone or replica.state is not was:
            self._stir(now)
        if change.gone or (replica.state is not was and not self._fleet.hopeful(report.replica)):
            self._shrunk = True
        return True

    def replica_lost(self, replica: ReplicaId, now: float) -> None:
        """Its stream broke or fell silent. It stays in the ring: its adapters come home with it."""
        if replica in self._fleet.replicas:
            self._fleet.lose(replica, now)
            self._residency.lose(replica)
            self._shrunk = True
            self._stir(now)

    def leave(self, replica: ReplicaId, now: float) -> None:
        """Drain it once others have what it has, or after `handover_s`; it serves meanwhile."""
        mine = self._fleet.replicas.get(replica)
        if self._placement is None:
            self.drain(replica, now)
        elif mine is not None and mine.leaving_by is None and not mine.drained:
            mine.leaving_by = now + self._handover_s
            self._leaving[replica] = mine
            self._stir(now)
            self._let_leave(now)

    def drain(self, replica: ReplicaId, now: float) -> None:
        """Nothing new is sent there."""
        if (mine := self._fleet.replicas.get(replica)) is not None:
            mine.leaving_by = None
            self._fleet.drain(replica, on=True, now=now)
            self._shrunk = True
            self._stir(now)

    def resume(self, replica: ReplicaId, now: float) -> None:
        """Also of one that is about to leave."""
        if (mine := self._fleet.replicas.get(replica)) is not None:
            mine.leaving_by = None
            self._fleet.drain(replica, on=False, now=now)
            self._note_room(replica)
            self._stir(now)

    def listing(self, store: str, states: Iterable[AdapterState], now: float) -> None:
        """What a store has that replicas name in their reports (`ReplicaReport.store`)."""
        change = self._residency.listing(store, states)
        self._room.note_nearer(change.gained)
        self._shrunk |= bool(change.gone)
        self._stir(now)

    def expect(self, expected: Iterable[Expected]) -> None:
        """A schedule of adapters that will be asked for; in place of the one before."""
        if self._placement is not None:
            self._placement.expect(expected)

    def orders(self, now: float) -> list[Order]:
        """What to bring where, ahead of its use. Ask after each poll: most answers are empty."""
        if self._placement is None:
            return []
        orders = self._placement.advance(now)
        if self._leaving:
            self._let_leave(now)
        return orders

    def _let_leave(self, now: float) -> None:
        """Drain those whose adapters have been handed over, or whose time is up."""
        assert self._placement is not None
        for replica, mine in list(self._leaving.items()):
            if mine.leaving_by is None or self._fleet.replicas.get(replica) is not mine:
                del self._leaving[replica]
            elif now >= mine.leaving_by or self._placement.handed_over(mine):
                self.drain(replica, now)

    def _orders_due(self) -> float:
        if self._placement is None:
            return math.inf
        due = self._placement.due
        for mine in self._leaving.values():
            due = min(due, mine.leaving_by or math.inf)
        return due

    def _stir(self, now: float) -> None:
        if self._placement is not None:
            self._placement.stir(now)

    def _heed(self) -> None:
        """Ejections take hope from those that wait, and what ends them gives places."""
        while self._fleet.health.news:
            self.verdicts.append(verdict := self._fleet.health.news.pop(0))
            self._shrunk |= verdict.standing is Standing.EJECTED
            self._note_room(verdict.replica)

    def _claim(self, tenant: TenantId, now: float) -> float:
        """Of whose turn it is; it matters where a replica has nothing but last places."""
        if len(self._fleet.roomy) == len(self._fleet.open):
            return FIRST
        return self._room.claim(tenant, now)

    def _note_room(self, replica: ReplicaId | None) -> None:
        if replica is not None and replica in self._fleet.open:
            self._fleet.replicas[replica].kept_from = NONE  # whom it was kept from is asked again
            self._room.note_room(replica)

    # -- fairness, and several gateways: fair_queue's words

    def fairness(self) -> float:
        return self._room.fairness()

    @property
    def fairness_gap(self) -> float:
        return self._room.gap

    def take_served(self) -> dict[TenantId, float]:
        return self._room.take_served()

    def running(self) -> dict[TenantId, float]:
        return self._room.running()

    def served_elsewhere(self, tenant: TenantId, served: float, running: float) -> None:
        self._room.served_elsewhere(tenant, served, running)
