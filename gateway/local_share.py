"""A gateway's own buckets while the store is away: its share of each limit, and no gift.

They begin at the levels last seen, so that an outage refills nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.core import bucket
from gateway.limits import Answer, Limit, Line, lines_of
from gateway.tenants import Limits, Tenant
from shared.ids import TenantId

_SEEN_MAX: Final = 10_000  # tenants whose last levels are remembered


class LocalShare:
    """This gateway's own buckets for an outage, beginning at the levels last seen."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._seen: dict[TenantId, tuple[float, dict[Limit, float]]] = {}  # when, levels
        self._buckets: dict[TenantId, tuple[Limits, dict[Limit, bucket.TokenBucket]]] = {}

    def saw(self, tenant: Tenant, answer: Answer, now: float) -> None:
        """The store decided: remember the levels, and end the tenant's outage."""
        if self._buckets:
            self._buckets.pop(tenant.id, None)
        if len(self._seen) >= _SEEN_MAX and tenant.id not in self._seen:
            del self._seen[next(iter(self._seen))]
        names = (line.name for line in answer.lines)
        self._seen[tenant.id] = (now, dict(zip(names, answer.levels, strict=True)))

    def take(self, tenant: Tenant, lines: Sequence[Line], now: float) -> Answer:
        """All or nothing, as the script does it; costs are clipped to the share."""
        buckets = self._of(tenant, now)
        lines = [
            line._replace(cost=min(line.cost, int(buckets[line.name].burst))) for line in lines
        ]
        refuses, wait_s = None, 0.0
        for line in lines:
            if buckets[line.name].level(now) < line.cost:
                answer = buckets[line.name].take(line.cost, now)
                if isinstance(answer, bucket.Denied) and answer.retry_after_s > wait_s:
                    refuses, wait_s = line, answer.retry_after_s
        if refuses is None:
            for line in lines:
                buckets[line.name].take(line.cost, now)
        return Answer(lines, [buckets[line.name].level(now) for line in lines], refuses, wait_s)

    def settle(self, tenant: TenantId, name: Limit, delta: float, now: float) -> None:
        _, buckets = self._buckets.get(tenant, (None, {}))
        if name in buckets:
            buckets[name].settle(delta, now)

    def _of(self, tenant: Tenant, now: float) -> dict[Limit, bucket.TokenBucket]:
        limits, buckets = self._buckets.get(tenant.id, (None, {}))
        if limits == tenant.limits:
            return buckets
        at, levels = self._seen.get(tenant.id, (now, {}))
        buckets = {}
        for line in lines_of(tenant.limits, 0):
            # a share below one request would never let one through
            burst = max(1.0, self._share * line.limit)
            made = bucket.TokenBucket(rate_per_s=self._share * line.limit / 60, burst=burst, now=at)
            used = line.limit - levels.get(line.name, line.limit)
            made.settle(self._share * used, at)
            buckets[line.name] = made
        self._buckets[tenant.id] = (tenant.limits, buckets)
        return buckets
