"""The ring: for each adapter an order of all replicas, its home first, that hardly moves.

Every replica owns `vnodes` points on a circle; an adapter hashes onto the circle and meets the
replicas in the order in which their first points follow. Removing a replica deletes it from every
order and leaves the rest in place; adding one only inserts it. About 1/n of the adapters change
home, where `hash(adapter) % n` would move nearly all.

Points hash stable names (`replica-3`), never addresses, so a restart moves nothing, and the hash is
BLAKE2b, not Python's, so every gateway and every run draws the same circle. A mark stands between a
name and the number of its point: vnode 1 of `replica-1` and vnode 11 of `replica-` must not be one.

The only module that knows uhashring, which draws the circle. Walking it to the end costs time
proportional to the fleet, so the first `REACH` steps are a question of their own, and the answers
are remembered: at most `remembered_max`, forgotten whenever a replica comes or goes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Final

from uhashring import HashRing

from shared.ids import AdapterId, ReplicaId

REACH: Final = 32
"""Steps from home that are looked at one by one; a larger fleet has shorter ways to the rest."""

_MARK: Final = "#"
_CHANGES_MAX: Final = 4


class AdapterRing:
    def __init__(self, *, vnodes: int, remembered_max: int = 1 << 17) -> None:
        self._vnodes = vnodes
        self._replicas: set[ReplicaId] = set()
        self._ring = HashRing(nodes=[], vnodes=vnodes, hash_fn=_point)
        self._drawn: set[ReplicaId] = set()  # those whose points are on it
        self._circle: tuple[array[int], list[ReplicaId]] | None = None  # points, and whose, twice
        self._near: OrderedDict[AdapterId, tuple[ReplicaId, ...]] = OrderedDict()
        self._remembered_max = remembered_max

    def add(self, replica: ReplicaId) -> None:
        """Harmless when it is there already."""
        if replica not in self._replicas:
            self._replicas.add(replica)
            self._changed()

    def remove(self, replica: ReplicaId) -> None:
        """Harmless when it is not there."""
        if replica in self._replicas:
            self._replicas.discard(replica)
            self._changed()

    def near(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """The first REACH replicas of its order."""
        near = self._near.get(adapter)
        if near is None:
            near = self._near[adapter] = self._walk(adapter, REACH)
            if len(self._near) > self._remembered_max:
                self._near.popitem(last=False)
        return near

    def walk(self, adapter: AdapterId) -> Iterable[ReplicaId]:
        """As `near`, for who may stop at home: nothing more is then looked for, or remembered."""
        near = self._near.get(adapter)
        return self._from_home(adapter) if near is None else near

    def order(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """All replicas, the adapter's home first."""
        return self._walk(adapter, len(self._replicas))

    @property
    def points(self) -> int:
        return len(self._draw()[0])

    def check(self) -> None:
        assert self.points == self._vnodes * len(self._replicas), "points lost to a collision"
        assert len(self._near) <= self._remembered_max
        for adapter, near in self._near.items():
            assert near == self.order(adapter)[:REACH], (
                f"the order of {adapter} is of another fleet"
            )

    def _changed(self) -> None:
        self._circle = None
        self._near.clear()

    def _from_home(self, adapter: AdapterId) -> Iterator[ReplicaId]:
        points, owners = self._draw()
        if points:
            yield owners[bisect_right(points, _point(adapter))]
            yield from islice(self.near(adapter), 1, None)

    def _walk(self, adapter: AdapterId, steps: int) -> tuple[ReplicaId, ...]:
        """The owners of the points after the adapter's, each once."""
        points, owners = self._draw()
        start = bisect_right(points, _point(adapter))
        steps = min(steps, len(self._replicas))
        span = steps + steps // 8  # a few are met twice
        while len(met := dict.fromkeys(owners[start : start + span])) < steps:
            span *= 2
        return tuple(met)[:steps]

    def _draw(self) -> tuple[array[int], list[ReplicaId]]:
        """The circle as it is now: its points, and whose they are.

        uhashring sorts all points at each change, so a fleet that comes at once is drawn at once.
        """
        if self._circle is None:
            gone, new = self._drawn - self._replicas, self._replicas - self._drawn
            if len(gone) + len(new) > _CHANGES_MAX:
                nodes = [replica + _MARK for replica in sorted(self._replicas)]
                self._ring = HashRing(nodes=nodes, vnodes=self._vnodes, hash_fn=_point)
            else:
                for replica in gone:
                    self._ring.remove_node(replica + _MARK)
                for replica in new:
                    self._ring.add_node(replica + _MARK)
            self._drawn = set(self._replicas)
            points = self._ring.get_points()
            names = {replica + _MARK: replica for replica in self._replicas}
            owners = [names[name] for _, name in points]  # a string a replica, not one a point
            self._circle = array("Q", [point for point, _ in points]), owners * 2
        return self._circle


def _point(label: str) -> int:
    return int.from_bytes(blake2b(label.encode("utf-8", "surrogatepass"), digest_size=8).digest())
