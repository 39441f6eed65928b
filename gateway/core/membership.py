"""The fleet's part of the dispatcher: what comes and goes, and whom that helps or hurts.

A change can give those who wait a place, or bring an adapter nearer (`_room` is told which), or
leave something served by fewer (`_shrunk`): then the next poll looks for requests without hope.
"""

from __future__ import annotations

from gateway.core.outlook import Outlook
from gateway.core.waiting_room import WaitingRoom
from shared.ids import ReplicaId
from shared.messages import ReplicaReport


class Membership(Outlook):
    _room: WaitingRoom  # made by the dispatcher
    _shrunk = False  # something is served by fewer

    def replica_added(self, replica: ReplicaId, now: float) -> None:
        """It takes requests from its first report on."""
        self._ring.add(replica)
        self._fleet.add(replica, now)

    def replica_removed(self, replica: ReplicaId, now: float) -> None:
        """Out of the ring for good: its adapters move. Its requests in flight may still end."""
        self._ring.remove(replica)
        self._fleet.remove(replica, now)
        self._residency.forget(replica)
        self._shrunk = True

    def report(self, report: ReplicaReport, now: float) -> bool:
        """False when it changed nothing: stale, repeated, or of a replica that was not added."""
        replica = self._fleet.replicas.get(report.replica)
        if replica is None or (change := self._residency.apply(report, now)) is None:
            return False
        was_open, was = replica.open, replica.state
        self._fleet.report(report, now)
        self._fleet.health.judge(now)
        if not was_open:
            self._note_room(report.replica)
        self._room.note_nearer(change.gained)
        if change.gone or (replica.state is not was and not self._fleet.hopeful(report.replica)):
            self._shrunk = True
        return True

    def replica_lost(self, replica: ReplicaId, now: float) -> None:
        """Its stream broke or fell silent. It stays in the ring: its adapters come home with it."""
        if replica in self._fleet.replicas:
            self._fleet.lose(replica, now)
            self._residency.lose(replica)
            self._shrunk = True

    def drain(self, replica: ReplicaId, now: float) -> None:
        """Nothing new is sent there."""
        if replica in self._fleet.replicas:
            self._fleet.drain(replica, on=True, now=now)
            self._shrunk = True

    def resume(self, replica: ReplicaId, now: float) -> None:
        if replica in self._fleet.replicas:
            self._fleet.drain(replica, on=False, now=now)
            self._note_room(replica)

    def _note_room(self, replica: ReplicaId | None) -> None:
        if replica is not None and replica in self._fleet.open:
            self._room.note_room(replica)
