"""One partition of the fleet's host memory: rooms at replicas, given to adapters in turn.

A room is what a replica has to give: `host_share` of the places and bytes that it reports. Law: a
room is never overdrawn; an adapter's owners are the first replicas in its order that had room when
its turn came, and serve it. It takes there what that replica says that it does (in another
precision it is of another size), or what others say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

from gateway.core.fleet import Fleet, Replica, ReplicaState
from gateway.core.residency import ResidencyMap
from shared.ids import AdapterId, ReplicaId

UNUSED: Final = -(1 << 30)
"""The level of an adapter that nobody has asked for lately."""

_SPARE_LEVELS: Final = 2
"""What each spare is worth less than the one before it, in powers of two."""

_IDLE: Final = 1 << 20
"""The gain of whom nobody has asked for; later than any other's, however many spares those have."""


@dataclass(slots=True)
class Room:
    mine: Replica
    places: float
    bytes: float
    owned: list[AdapterId] = field(default_factory=list)  # in the order of their turns


class Partition:
    def __init__(self, *, fleet: Fleet, residency: ResidencyMap, host_share: float) -> None:
        self._fleet = fleet
        self._residency = residency
        self.rooms: Final = dict(_rooms(fleet, host_share))
        self.owners: Final[dict[AdapterId, list[ReplicaId]]] = {}
        self._full = sum(room.places < 1 for room in self.rooms.values())

    def assign(self, adapter: AdapterId, k: int) -> bool:
        """k owners more; whether there was room for one."""
        owners = self.owners.setdefault(adapter, [])
        before = len(owners)
        holders, size = self._residency.holders(adapter), self._residency.size_bytes(adapter)
        for pool in self._fleet.pools.for_adapter(adapter):
            for replica in pool.ring.near(adapter):
                if len(owners) - before == k:
                    return True
                room = self.rooms.get(replica)
                if room is None or room.places < 1 or replica in owners:
                    continue
                state = holders.get(replica)
                if state is not None and room.bytes >= (takes := state.size_bytes or size):
                    self._give(room, adapter, takes)
                    owners.append(replica)
        return len(owners) > before

    def spare(self, names: Sequence[tuple[int, AdapterId]], spares: int) -> Iterator[None]:
        """Give away what is left, one owner at a time, to whoever gains most by it.

        A step each, so that the caller may pause.
        """
        heap = [(-level if level > UNUSED else _IDLE, 0, adapter) for level, adapter in names]
        heapify(heap)
        while spares and heap and self._full < len(self.rooms):
            gain, had, adapter = heappop(heap)
            if self.owners[adapter] and self.assign(adapter, 1) and had + 1 < spares:
                heappush(heap, (gain + _SPARE_LEVELS, had + 1, adapter))
            yield

    def check(self) -> None:
        owned: dict[ReplicaId, int] = {}
        for adapter, owners in self.owners.items():
            assert len(set(owners)) == len(owners), f"{adapter} has an owner twice"
            for replica in owners:
                owned[replica] = owned.get(replica, 0) + 1
        for replica, room in self.rooms.items():
            assert room.places >= 0, f"{replica} is overdrawn"
            assert room.bytes >= 0, f"{replica} is overdrawn"
            assert len(room.owned) == owned.get(replica, 0)

    def _give(self, room: Room, adapter: AdapterId, size: int) -> None:
        room.places -= 1
        room.bytes -= size
        room.owned.append(adapter)
        self._full += room.places < 1


def has_host(mine: Replica) -> bool:
    """It says how much of its host memory is for adapters, and so takes orders."""
    said = mine.said
    return said is not None and said.merged is None and bool(said.host_max or said.host_bytes)


def _rooms(fleet: Fleet, share: float) -> Iterator[tuple[ReplicaId, Room]]:
    for mine in fleet.replicas.values():
        said = mine.said
        if said is not None and has_host(mine) and _may_own(mine):
            places = math.floor(share * said.host_max) if said.host_max else math.inf
            yield mine.id, Room(mine, places, share * said.host_bytes or math.inf)


def _may_own(mine: Replica) -> bool:
    """It is here to stay; a passing trouble moves no adapter."""
    gone = (ReplicaState.UNKNOWN, ReplicaState.LOST, ReplicaState.DRAINING)
    return mine.state not in gone and mine.leaving_by is None and not mine.draining
