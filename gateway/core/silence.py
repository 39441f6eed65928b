"""Which replica has been silent too long.

Silence for `heartbeats` of its own heartbeats is a loss. Silence is ours when our own loop was held
up: the reports of that time lie unread. So one that is due is looked at once more after LOOK_S, and
after as long as we came late (a heartbeat at most, in which a replica that was held up with us has
spoken).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from gateway.core.replica import Replica, ReplicaState
from shared.ids import ReplicaId

FIRST_HEARTBEAT_S: Final = 1.0
"""Assumed of a replica that has not said its own yet."""

LOOK_S: Final = 0.05
"""A replica that fell silent is looked at once more after this: its report may lie unread."""


class Silence:
    def __init__(self, replicas: Mapping[ReplicaId, Replica], *, heartbeats: float) -> None:
        self._replicas = replicas
        self._heartbeats = heartbeats
        self.due = math.inf
        """When `silent` may next have something to say: never late, early after a report."""

    def heard(self, mine: Replica, now: float) -> None:
        """Something of it; of a new one, that it is there."""
        self.due = min(self.due, now + self._patience_s(mine))

    def silent(self, now: float) -> list[ReplicaId]:
        """Replicas that are lost now, told once. Nothing is looked at before one can be due."""
        if now < self.due:
            return []
        silent, self.due = [], math.inf
        for mine in self._replicas.values():
            if mine.state is ReplicaState.LOST:
                continue
            due = mine.heard_at + self._patience_s(mine)
            if due <= now and mine.look_until is None:
                late_s = min(now - due, _heartbeat_s(mine))  # our loop was held up as long
                mine.look_until = now + max(LOOK_S, late_s)
            due = mine.look_until or due
            if due <= now:
                silent.append(mine.id)
            else:
                self.due = min(self.due, due)
        return sorted(silent)

    def _patience_s(self, mine: Replica) -> float:
        return self._heartbeats * _heartbeat_s(mine)


def _heartbeat_s(mine: Replica) -> float:
    return mine.said.heartbeat_s if mine.said is not None else FIRST_HEARTBEAT_S
