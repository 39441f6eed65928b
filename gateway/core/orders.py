"""Orders to replicas: bring an adapter nearer, ahead of its use, and how often that is said.

Law: of one adapter, tier and replica at most `attempts` orders follow each other, with pauses that
double from `retry_s`; then it is left alone for as long again, or until the replica starts anew. At
most `ahead_max` of a replica are open: said, not arrived, and not yet due to be said again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.core.residency import ResidencyMap
from shared.ids import AdapterId, ReplicaId
from shared.messages import Tier


class Order(NamedTuple):
    """Bring adapters to a tier of a replica, ahead of their use.

    HOST: whatever is there already is touched, in this order; the rest is fetched, in this order.
    GPU: into slots that are free; none is emptied for it.
    """

    replica: ReplicaId
    tier: Tier
    adapters: tuple[AdapterId, ...]


@dataclass(slots=True)
class _Asked:
    times: int
    again_at: float


@dataclass(slots=True)
class _Of:
    """One life of a replica."""

    boot: str
    asked: dict[tuple[AdapterId, Tier], _Asked]
    open: int = 0  # as of the cycle that runs


class Orders:
    def __init__(
        self, *, residency: ResidencyMap, ahead_max: int, retry_s: float, attempts: int
    ) -> None:
        self._residency = residency
        self._ahead_max = ahead_max
        self._retry_s = retry_s
        self._attempts = attempts
        self._of: dict[ReplicaId, _Of] = {}

    def begin(self, now: float) -> None:
        """A cycle begins: forget what was said to replicas in another life, and what was long ago;
        count what is open."""
        long_s = self._retry_s * 2.0**self._attempts
        for replica, mine in list(self._of.items()):
            if mine.boot != self._residency.boot(replica):
                del self._of[replica]
                continue
            asked = mine.asked
            for key in [key for key, one in asked.items() if now >= one.again_at + long_s]:
                del asked[key]
            mine.open = sum(self._is_open(replica, *item, now) for item in asked.items())

    def ask(self, replica: ReplicaId, adapter: AdapterId, tier: Tier, now: float) -> bool:
        """Whether it may be ordered; then it counts as ordered."""
        mine = self._of.get(replica)
        if mine is None:
            mine = self._of[replica] = _Of(self._residency.boot(replica), {})
        if mine.open >= self._ahead_max:
            return False
        one = mine.asked.get((adapter, tier))
        if one is None:
            one = mine.asked[adapter, tier] = _Asked(0, now)
        elif now < one.again_at or one.times >= self._attempts:
            return False
        one.times += 1
        one.again_at = now + self._retry_s * 2.0 ** (one.times - 1)
        mine.open += 1
        return True

    def check(self) -> None:
        for mine in self._of.values():
            assert 0 <= mine.open <= self._ahead_max
            assert all(0 < one.times <= self._attempts for one in mine.asked.values())

    def _is_open(
        self, replica: ReplicaId, what: tuple[AdapterId, Tier], asked: _Asked, now: float
    ) -> bool:
        state = self._residency.near(what[0]).get(replica)
        arrived = state is not None and (what[1] is not Tier.GPU or state.tier is Tier.GPU)
        return now < asked.again_at and not arrived
