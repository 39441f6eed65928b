"""The ring: for each adapter an order of all replicas, its home first, that hardly moves.

Every replica owns `vnodes` points on a circle; an adapter hashes onto the circle and meets the
replicas in the order in which their first points follow. Removing a replica deletes it from every
order and leaves the rest in place; adding one only inserts it. About 1/n of the adapters change
home, where `hash(adapter) % n` would move nearly all.

Points hash stable names (`replica-3`), never addresses, so a restart moves nothing, and the hash is
BLAKE2b, not Python's, so every gateway and every run draws the same circle. A mark stands between a
name and the number of its point: vnode 1 of `replica-1` and vnode 11 of `replica-` must not be one.

The only module that knows uhashring, which draws the circle. Walking it to the end costs time
proportional to the fleet, so the first `REACH` steps are a question of their own, answered step by
step: most who ask stop at home. Where adapters stand on the circle is remembered, of at most
`remembered_max`, and forgotten whenever a replica comes or goes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
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
        self._circle: tuple[array[int], list[ReplicaId]] | None = None  # points, and whose
        self._starts: OrderedDict[AdapterId, int] = OrderedDict()  # the first point after each
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

    def walk(self, adapter: AdapterId, steps: int = REACH) -> Iterator[ReplicaId]:
        """The first replicas of its order, at the price of the steps that are taken."""
        _, owners = self._circle or self._draw()
        start = self._starts.get(adapter)
        if start is None:
            start = self._start(adapter)
        steps = min(steps, len(self._replicas))
        met: set[ReplicaId] = set()
        for at in range(start - len(owners), start):  # from behind: the end joins the beginning
            replica = owners[at]
            if replica not in met:
                yield replica
                met.add(replica)
                if len(met) == steps:
                    return

    def near(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """The first REACH replicas of its order."""
        return tuple(self.walk(adapter))

    def order(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """All replicas, the adapter's home first."""
        return tuple(self.walk(adapter, len(self._replicas)))

    @property
    def points(self) -> int:
        return len(self._draw()[0])

    def check(self) -> None:
        assert self.points == self._vnodes * len(self._replicas), "points lost to a collision"
        assert len(self._starts) <= self._remembered_max
        for adapter, start in self._starts.items():
            assert start == bisect_right(self._draw()[0], _point(adapter)), (
                f"the order of {adapter} is of another fleet"
            )

    def _changed(self) -> None:
        self._circle = None
        self._starts.clear()

    def _start(self, adapter: AdapterId) -> int:
        """Where the points after its own begin."""
        points, _ = self._draw()
        start = self._starts[adapter] = bisect_right(points, _point(adapter))
        if len(self._starts) > self._remembered_max:
            self._starts.popitem(last=False)
        return start

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
            self._circle = array("Q", [point for point, _ in points]), owners
        return self._circle


def _point(label: str) -> int:
    return int.from_bytes(blake2b(label.encode(errors="surrogatepass"), digest_size=8).digest())
