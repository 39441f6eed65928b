"""What passed-over lines wait for: a place on one of some replicas, or a moment.

A key (the adapter and the replicas to avoid) is parked in one of two ways. Stuck: none of its
replicas has room, so nobody's request of this key can be placed; or only in a reserve
(gateway/core/reserve.py), and so nobody's whom that is kept from. Patient: it could be placed, but
its head prefers to wait until a moment for a replica that has its adapter nearer; another tenant's
older head of the same key need not. Both end when a replica that it wants has a place more, when a
report brings its adapter nearer, and a patient one also at its moment.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from heapq import heappop, heappush

from gateway.core.terms import Model
from shared.ids import AdapterId, ReplicaId

Key = tuple[Model, frozenset[ReplicaId]]
"""All that decides where a request may go: its adapter or base, and what it tried already."""


@dataclass(slots=True)
class _Wait:
    wanted: frozenset[ReplicaId]
    stuck: bool
    kept: bool = False  # stuck, but not for those who may have a replica's last places


class Parking:
    def __init__(self) -> None:
        self._waits: dict[Key, _Wait] = {}
        self._moments: list[tuple[float, int, Key]] = []  # heap
        self._ties = 0

    def stick(self, key: Key, wanted: frozenset[ReplicaId], *, kept: bool = False) -> None:
        """None of `wanted`, all that could take it, has room; or room that is `kept`."""
        self._waits[key] = _Wait(wanted, stuck=True, kept=kept)

    def be_patient(self, key: Key, wanted: frozenset[ReplicaId], until: float) -> None:
        """It would rather have a place on one of `wanted`, and waits for one until then."""
        wait = self._waits.setdefault(key, _Wait(wanted, stuck=False))
        wait.wanted |= wanted
        self._ties += 1
        heappush(self._moments, (until, self._ties, key))

    def stuck(self, key: Key, *, claims: bool = False) -> bool:
        """`claims`: for one who may have a replica's last places."""
        wait = self._waits.get(key)
        return wait is not None and wait.stuck and not (claims and wait.kept)

    def wake(
        self,
        freed: Collection[ReplicaId],
        nearer: Collection[AdapterId],
        now: float,
        *,
        opened: bool = False,
    ) -> list[Key]:
        """The keys whose wait is over; they are parked no longer. Any place may help the base.

        `opened`: what was kept may be open to them now.
        """
        over = [key for key, wait in self._waits.items() if wait.kept] if opened else []
        if freed or nearer:
            over += [
                key
                for key, wait in self._waits.items()
                if key[0] in nearer or key[0] is None or not wait.wanted.isdisjoint(freed)
            ]
        while self._moments and self._moments[0][0] <= now:
            over.append(heappop(self._moments)[2])
        return [key for key in over if self._waits.pop(key, None) is not None]

    def next_moment(self) -> float:
        """The first moment at which somebody's patience ends; never late."""
        while self._moments and self._moments[0][2] not in self._waits:
            heappop(self._moments)
        return self._moments[0][0] if self._moments else math.inf

    def __bool__(self) -> bool:
        return bool(self._waits)

    def check(self) -> None:
        moments = {key for _, _, key in self._moments}
        for key, wait in self._waits.items():
            assert wait.stuck or key in moments, f"{key} would wait for ever"
            assert not wait.wanted & key[1], f"{key} waits for what it must avoid"
