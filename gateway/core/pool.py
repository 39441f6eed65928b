"""A pool: replicas that can stand in for one another, its ring, and its load with no look at each.

Replicas are of one pool when they have the same base, the same rank cap and the same purpose: a
merged replica has one adapter folded into its weights and serves nothing else. Each pool has a ring
of its own, so adapters of different bases or ranks never meet, and a replica is of no pool before
its first report.

    load, capacity      sums over the open members (those that could take one more), kept as they
                        change: the mean that bounds are drawn from costs nothing to ask
    least_loaded        a heap whose keys may be too low and are mended when they are seen: the
                        least of n costs O(log n), a request's begin costs nothing

Law: the sums equal a recount, and the first of `least_loaded` is the least by (load / capacity, id)
of the open members.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from gateway.core.replica import Replica
from gateway.core.reserve import FIRST
from gateway.core.ring import AdapterRing
from shared.ids import AdapterId, ReplicaId
from shared.messages import ReplicaReport

_NOTHING: Final = (0, 0)


class PoolKey(NamedTuple):
    max_rank: int  # 0: it did not say
    base: str
    merged: AdapterId | None

    @classmethod
    def of(cls, report: ReplicaReport) -> PoolKey:
        return cls(report.max_rank, report.base, report.merged)


class Pool:
    def __init__(self, key: PoolKey, *, vnodes: int) -> None:
        self.key: Final = key
        self.ring: Final = AdapterRing(vnodes=vnodes)
        self.members: Final[dict[ReplicaId, Replica]] = {}
        self.load = 0  # of the open members
        self.capacity = 0
        self._heap: list[tuple[float, ReplicaId]] = []

    def add(self, mine: Replica) -> None:
        self.members[mine.id] = mine
        self.ring.add(mine.id)
        mine.heap_key = None
        self.note(mine)

    def remove(self, mine: Replica) -> None:
        self._count(mine, _NOTHING)
        mine.heap_key = None
        del self.members[mine.id]
        self.ring.remove(mine.id)

    def note(self, mine: Replica) -> None:
        """Its load, places or standing may have changed."""
        if not mine.open:
            self._count(mine, _NOTHING)
            return
        self._count(mine, (mine.load, mine.capacity))
        busy = mine.busy
        if mine.heap_key is None or busy < mine.heap_key:
            mine.heap_key = busy
            heappush(self._heap, (busy, mine.id))
            if len(self._heap) > 4 * len(self.members) + 16:
                self._rebuild()

    def least_loaded(
        self, n: int, skip: Collection[ReplicaId] = (), *, claim: float = FIRST
    ) -> list[Replica]:
        """The n least loaded open members for their capacity that are not in `skip`, in order.

        With a weaker claim (gateway/core/reserve.py): of those that have a place for it.
        """
        found: list[Replica] = []
        seen: list[tuple[float, ReplicaId]] = []
        heap = self._heap
        while heap and len(found) < n:
            key, replica = heappop(heap)
            mine = self.members.get(replica)
            if mine is None or mine.heap_key != key or (seen and seen[-1] == (key, replica)):
                continue  # it has left, or this key was overtaken by a lower one
            if not mine.open:
                mine.heap_key = None
            elif (busy := mine.busy) > key:
                mine.heap_key = busy
                heappush(heap, (busy, replica))
            else:
                seen.append((key, replica))
                if replica not in skip and mine.load < mine.places(claim):
                    found.append(mine)
        for entry in seen:
            heappush(heap, entry)
        return found

    def check(self) -> None:
        self.ring.check()
        opened = [mine for mine in self.members.values() if mine.open]
        assert self.load == sum(mine.load for mine in opened), "the pool's load is no sum"
        assert self.capacity == sum(mine.capacity for mine in opened)
        by_load = sorted(opened, key=lambda mine: (mine.busy, mine.id))
        assert self.least_loaded(len(self.members)) == by_load, "the heap lost somebody"

    def _count(self, mine: Replica, now: tuple[int, int]) -> None:
        load, capacity = mine.counted
        self.load += now[0] - load
        self.capacity += now[1] - capacity
        mine.counted = now

    def _rebuild(self) -> None:
        """Leave the keys that were overtaken behind."""
        self._heap = [
            (mine.heap_key, mine.id) for mine in self.members.values() if mine.heap_key is not None
        ]
        heapify(self._heap)
