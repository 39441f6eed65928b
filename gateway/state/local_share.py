"""A gateway's own limits while the store is away: its share of each, and no gift.

They begin at the levels last seen, so that an outage refills nothing. A budget is a bucket that
nothing refills; of leases the gateway counts its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core import bucket
from gateway.state.limits import Answer, Line, Plan
from shared.ids import TenantId

_SEEN_MAX: Final = 10_000  # tenants whose last levels are remembered
_FIELDS_MAX: Final = 256  # of one tenant: yesterday's budgets are among them
_LEASE_S: Final = 1.0  # nobody knows when a running request ends: ask again soon

Seen = tuple[float, float]
"""When, and the level."""


@dataclass(slots=True)
class _Own:
    """One limit, as long as the outage lasts."""

    limit: int
    until: float
    bucket: bucket.TokenBucket


class LocalShare:
    def __init__(self, share: float, running: Callable[[Line], int], wall: Callable[[], float]):
        """`running`: how many requests of this gateway hold a lease of that limit."""
        self._share = share
        self._running = running
        self._wall = wall
        self._seen: dict[TenantId, dict[str, Seen]] = {}
        self._own: dict[TenantId, dict[str, _Own]] = {}

    def saw(self, answer: Answer, tenant: TenantId, now: float) -> None:
        """The store decided: remember the levels, and end the tenant's outage."""
        if self._own:
            self._own.pop(tenant, None)
        seen = self._seen.get(tenant)
        if seen is None:
            if len(self._seen) >= _SEEN_MAX:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[tenant] = {}
        elif len(seen) > _FIELDS_MAX:
            seen.clear()
        for line, level in zip(answer.lines, answer.levels, strict=True):
            seen[line.key + line.field] = (now, level)

    def take(self, plan: Plan, costs: Sequence[int], now: float) -> tuple[Answer, list[int]]:
        """All or nothing, as the script does it; the costs as taken: clipped to the share."""
        refuses, wait_s, taken = None, 0.0, []
        for line, cost in zip(plan.lines, costs, strict=True):
            if line.kind == "rate":
                cost = min(cost, int(self._of(plan, line, now).burst))
            taken.append(cost)
            needs_s = self._needs_s(plan, line, cost, now)
            if needs_s > wait_s:
                refuses, wait_s = line, needs_s
        if refuses is None:
            for line, cost in zip(plan.lines, taken, strict=True):
                if line.kind != "lease":
                    self._of(plan, line, now).settle(cost, now)
        levels = [self._level(plan, line, now) for line in plan.lines]
        return Answer(plan.lines, levels, refuses, wait_s), taken

    def settle(self, tenant: TenantId, line: Line, delta: float, now: float) -> None:
        own = self._own.get(tenant, {}).get(line.key + line.field)
        if own is not None:
            own.bucket.settle(delta, now)

    def _needs_s(self, plan: Plan, line: Line, cost: int, now: float) -> float:
        """Until the limit would admit it; 0: it does."""
        if cost <= 0:
            return 0.0
        level = self._level(plan, line, now)
        if line.kind == "lease":
            return 0.0 if level >= 1 else _LEASE_S
        if line.kind == "budget":
            return 0.0 if level > 0 else max(1.0, line.until - self._wall())
        if level >= cost:
            return 0.0
        answer = self._of(plan, line, now).take(cost, now)
        return answer.retry_after_s if isinstance(answer, bucket.Denied) else 0.0

    def _level(self, plan: Plan, line: Line, now: float) -> float:
        if line.kind == "lease":
            return max(1, int(self._share * line.limit)) - self._running(line)
        return self._of(plan, line, now).level(now)

    def _of(self, plan: Plan, line: Line, now: float) -> bucket.TokenBucket:
        tenant, name = plan.tenant.id, line.key + line.field
        mine = self._own.setdefault(tenant, {})
        own = mine.get(name)
        if own is not None and (own.limit, own.until) == (line.limit, line.until):
            return own.bucket
        # a share below one request would never let one through
        burst = max(1.0, self._share * line.limit)
        rate = self._share * line.limit / 60 if line.kind == "rate" else 0.0
        at, level = self._seen.get(tenant, {}).get(name, (now, float(line.limit)))
        made = bucket.TokenBucket(rate_per_s=rate, burst=burst, now=at)
        made.settle(self._share * (line.limit - level), at)
        mine[name] = _Own(line.limit, line.until, made)
        return made
