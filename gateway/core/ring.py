"""The ring: for each adapter an order of all replicas, its home first, that hardly moves.

Every replica owns `vnodes` points on a circle; an adapter hashes onto the circle and meets the
replicas in the order in which their first points follow. Removing a replica deletes it from every
order and leaves the rest in place; adding one only inserts it. About 1/n of the adapters change
home, where `hash(adapter) % n` would move nearly all.

Points hash stable names (`replica-3`), never addresses, so a restart moves nothing, and the hash is
BLAKE2b, not Python's, so every gateway and every run draws the same circle. A mark stands between a
name and the number of its point: vnode 1 of `replica-1` and vnode 11 of `replica-` must not be one.

The only module that knows uhashring. Walking the circle costs some 100 µs in a fleet of a hundred,
so orders are remembered: at most `remembered_max`, forgotten whenever a replica comes or goes.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from uhashring import HashRing

from shared.ids import AdapterId, ReplicaId

_MARK = "#"


class AdapterRing:
    def __init__(self, *, vnodes: int, remembered_max: int = 8192) -> None:
        self._ring = HashRing(nodes=[], vnodes=vnodes, hash_fn=_point)
        self._vnodes = vnodes
        self._replicas: set[ReplicaId] = set()
        self._orders: OrderedDict[AdapterId, tuple[ReplicaId, ...]] = OrderedDict()
        self._remembered_max = remembered_max

    def add(self, replica: ReplicaId) -> None:
        """Harmless when it is there already."""
        if replica not in self._replicas:
            self._replicas.add(replica)
            self._ring.add_node(replica + _MARK, {"instance": replica})
            self._orders.clear()

    def remove(self, replica: ReplicaId) -> None:
        """Harmless when it is not there."""
        if replica in self._replicas:
            self._replicas.discard(replica)
            self._ring.remove_node(replica + _MARK)
            self._orders.clear()

    def order(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """All replicas, the adapter's home first."""
        order = self._orders.get(adapter)
        if order is None:
            order = tuple(node["instance"] for node in self._walk(adapter))
            self._orders[adapter] = order
            if len(self._orders) > self._remembered_max:
                self._orders.popitem(last=False)
        return order

    @property
    def points(self) -> int:
        return int(self._ring.size)

    def check(self) -> None:
        assert self.points == self._vnodes * len(self._replicas), "points lost to a collision"
        assert len(self._orders) <= self._remembered_max
        for adapter, order in self._orders.items():
            assert set(order) == self._replicas, f"the order of {adapter} is of another fleet"

    def _walk(self, adapter: AdapterId) -> list[dict[str, ReplicaId]]:
        return list(self._ring.range(adapter)) if self._replicas else []


def _point(label: str) -> int:
    return int.from_bytes(blake2b(label.encode(errors="surrogatepass"), digest_size=8).digest())
