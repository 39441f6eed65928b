"""The fleet's pools, and in which order an adapter or a base looks through them.

An adapter that is merged somewhere goes there first: it costs nothing there, and that replica has
nothing else to do. Then come the shared pools, that of the least rank cap first: what fits an
ordinary replica leaves the room of those for high ranks alone, and spills there only when it must.
The base model is served by the shared pools of that base; a merged replica no longer has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from gateway.core.pool import Pool, PoolKey
from gateway.core.replica import Replica
from shared.ids import AdapterId, ReplicaId
from shared.messages import ReplicaReport

_NONE: Sequence[Pool] = ()


class Pools:
    def __init__(self, *, vnodes: int) -> None:
        self._vnodes = vnodes
        self._by_key: dict[PoolKey, Pool] = {}
        self._of: dict[ReplicaId, Pool] = {}
        self._shared: list[Pool] = []  # least rank cap first
        self._merged: dict[AdapterId, list[Pool]] = {}

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._by_key.values())

    def of(self, replica: ReplicaId) -> Pool | None:
        """None before its first report."""
        return self._of.get(replica)

    def reported(self, mine: Replica) -> None:
        """It has said what it is; a restart may have made it another."""
        assert mine.said is not None
        key = self._key(mine.said)
        pool = self._of.get(mine.id)
        if pool is not None and pool.key == key:
            return
        if pool is not None:
            self.remove(mine)
        pool = self._by_key.get(key)
        if pool is None:
            pool = self._by_key[key] = Pool(key, vnodes=self._vnodes)
            self._index()
        pool.add(mine)
        self._of[mine.id] = pool

    def remove(self, mine: Replica) -> None:
        pool = self._of.pop(mine.id, None)
        if pool is not None:
            pool.remove(mine)
            if not pool.members:
                del self._by_key[pool.key]
                self._index()

    def note(self, mine: Replica) -> None:
        """Its load, places or standing may have changed."""
        pool = self._of.get(mine.id)
        if pool is not None:
            pool.note(mine)

    def for_adapter(self, adapter: AdapterId) -> Sequence[Pool]:
        """Those that may serve it, in order. Whether they have it is for its holders to say."""
        merged = self._merged.get(adapter)
        return self._shared if merged is None else [*merged, *self._shared]

    def for_base(self, base: str | None) -> Sequence[Pool]:
        """None: any base."""
        if base is None or len(self._shared) == 1:
            return self._shared if base is None or self._shared[0].key.base == base else _NONE
        return [pool for pool in self._shared if pool.key.base == base]

    def check(self, replicas: Iterable[Replica]) -> None:
        said = {mine.id for mine in replicas if mine.said is not None}
        assert self._of.keys() == said, "a replica that speaks is in one pool, another in none"
        for replica, pool in self._of.items():
            assert replica in pool.members
            assert self._by_key[pool.key] is pool
        for pool in self._by_key.values():
            pool.check()

    def _key(self, said: ReplicaReport) -> PoolKey:
        """One that does not say its rank cap is with those of the least."""
        key = PoolKey.of(said)
        if key.max_rank or key.merged is not None:
            return key
        caps = [p.key.max_rank for p in self._shared if p.key.base == key.base and p.key.max_rank]
        return key._replace(max_rank=min(caps, default=0))

    def _index(self) -> None:
        pools = [self._by_key[key] for key in sorted(self._by_key, key=_order)]
        self._shared = [pool for pool in pools if pool.key.merged is None]
        self._merged = {}
        for pool in pools:
            if pool.key.merged is not None:
                self._merged.setdefault(pool.key.merged, []).append(pool)


def _order(key: PoolKey) -> tuple[int, str, str]:
    return (key.max_rank, key.base, key.merged or "")
