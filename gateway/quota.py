"""What a tenant may still use: one reservation over all its limits, all or nothing.

A limit of n a minute is a bucket with burst n that refills at n / 60 a second. `reserve` takes one
request and the estimated tokens; `settle` later corrects the tokens by actual minus reserved. Laws:

- Exact across gateways: one script decides over all limits, on the server's clock.
- A refused call takes nothing, and its `retry_after_s` is true if nobody else takes meanwhile.
- An estimate is clipped to the limit: a small budget admits a request that names no max_tokens,
  and what it really used may leave the tenant in debt, which the next requests wait for.
- A request pays for itself even when it fails later; its tokens are settled at what was generated.

Store away or slow: the pure buckets of `core` decide on `local_share` of each limit, beginning at
the levels last seen, so that an outage is no gift. What they grant is owed to the store and
charged when it is back, less what has refilled since. A call whose fate is unknown (sent, never
answered) is not repeated and not owed: it is wrong by one request at most, for a minute at most.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from gateway.config import QuotaConfig
from gateway.core import bucket
from gateway.limits import Answer, Limit, LimitLine, LimitState, Line, lines_of, state_of
from gateway.store.redis import Store, StoreAway, StoreError, Word
from gateway.tenants import Limits, Tenant, bucket_key
from shared import tasks
from shared.clock import Clock, monotonic
from shared.ids import RequestId, TenantId

__all__ = ["Denied", "Granted", "LimitLine", "LimitState", "Quota", "Reservation"]

_log = logging.getLogger(__name__)

_SETTLE_S: Final = 0.05  # corrections gathered before one is sent per tenant and limit
_AWAY_S: Final = 0.5  # between looks whether the store is back
_STALE_S: Final = 1.0  # what is owed for longer than this refills meanwhile
_SEEN_MAX: Final = 10_000  # tenants whose last levels are remembered


@dataclass(slots=True)
class Reservation:
    """What one request took; settled once, however often `settle` is called."""

    tenant: TenantId
    request: RequestId
    tokens: int  # the estimate, clipped to the limit
    tokens_per_min: int | None
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Granted:
    state: LimitState
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class Denied:
    state: LimitState
    limit: Limit
    retry_after_s: float
    never: bool = False  # the limit is 0: waiting does not help


@dataclass(slots=True)
class _Owed:
    """Quota tokens to charge to the store (negative: to give back) once it takes them."""

    limit: int
    at: float
    amount: float = 0.0

    def add(self, amount: float, now: float) -> None:
        if now - self.at > _STALE_S:
            refilled = self.limit / 60 * (now - self.at)
            self.amount = math.copysign(max(0.0, abs(self.amount) - refilled), self.amount)
            self.at = now
        self.amount += amount


class Quota:
    def __init__(self, store: Store, config: QuotaConfig, clock: Clock = monotonic) -> None:
        self._store = store
        self._clock = clock
        self._refused = False  # the store is there, but answers with errors
        self._local = _LocalShare(config.local_share)
        self._owed: dict[tuple[TenantId, Limit], _Owed] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def degraded(self) -> bool:
        """Decisions are this gateway's own, not exact across gateways."""
        return self._store.away or self._refused

    async def reserve(self, tenant: Tenant, request: RequestId, tokens: int) -> Granted | Denied:
        """Take one request and `tokens` (input and output, estimated) from the tenant's limits."""
        lines = lines_of(tenant.limits, tokens)
        if blocked := next((line for line in lines if line.limit == 0), None):
            return Denied(await self.peek(tenant), blocked.name, 60.0, never=True)
        answer = await self._answer(tenant, lines)
        state = state_of(answer)
        if answer.refuses is not None:
            return Denied(state, answer.refuses.name, answer.wait_s)
        taken = next((line.cost for line in answer.lines if line.name == "tokens"), tokens)
        return Granted(state, Reservation(tenant.id, request, taken, tenant.limits.tokens_per_min))

    def settle(self, reservation: Reservation, actual_tokens: int) -> None:
        """Correct a grant by what was really used; never blocks, never raises."""
        limit = reservation.tokens_per_min
        if reservation.settled or limit is None:
            return
        reservation.settled = True
        delta, now = actual_tokens - reservation.tokens, self._clock()
        self._local.settle(reservation.tenant, "tokens", delta, now)
        self._owe(reservation.tenant, Line("tokens", limit, delta), now)

    async def peek(self, tenant: Tenant) -> LimitState:
        """What is left, taking nothing."""
        free = [replace(line, cost=0) for line in lines_of(tenant.limits, 0)]
        return state_of(await self._answer(tenant, free))

    async def close(self) -> None:
        """Send what is owed, if the store takes it now."""
        await self._pay()
        if self._timer is not None:
            self._timer.cancel()

    async def _answer(self, tenant: Tenant, lines: Sequence[Line]) -> Answer:
        if not lines:
            return Answer((), ())
        words: list[Word] = [""]
        for line in lines:
            words += (line.name, line.limit, line.cost)
        try:
            index, wait_s, *levels = await self._store.script(
                "reserve", [bucket_key(tenant.id)], words
            )
        except StoreAway as error:
            self._note(error)
            return self._decide_alone(tenant, lines, owe=not error.sent)
        self._refused = False
        refuses = lines[int(index) - 1] if int(index) else None
        answer = Answer(lines, [float(level) for level in levels], refuses, float(wait_s))
        self._local.saw(tenant, answer, self._clock())
        return answer

    def _decide_alone(self, tenant: Tenant, lines: Sequence[Line], *, owe: bool) -> Answer:
        now = self._clock()
        answer = self._local.take(tenant, lines, now)
        if owe and answer.refuses is None:
            for line in answer.lines:
                self._owe(tenant.id, line, now)
        return answer

    # paying what is owed

    def _owe(self, tenant: TenantId, line: Line, now: float) -> None:
        if line.cost == 0:
            return
        owed = self._owed.setdefault((tenant, line.name), _Owed(line.limit, now))
        owed.limit = line.limit
        owed.add(line.cost, now)
        if self._timer is None:
            wait_s = _AWAY_S if self._store.away else _SETTLE_S
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._due)

    def _due(self) -> None:
        self._timer = None
        tasks.spawn(self._pay(), name="quota settle")

    async def _pay(self) -> None:
        owed, self._owed = self._owed, {}
        await asyncio.gather(*[self._charge(*key, debt) for key, debt in owed.items()])

    async def _charge(self, tenant: TenantId, name: Limit, owed: _Owed) -> None:
        owed.add(0, self._clock())
        words = ["", name, owed.limit, owed.amount]
        try:
            if owed.amount:
                await self._store.script("settle", [bucket_key(tenant)], words)
        except StoreAway as error:
            self._note(error)
            if not error.sent:
                self._owe(tenant, Line(name, owed.limit, round(owed.amount)), self._clock())

    def _note(self, error: StoreAway) -> None:
        if isinstance(error, StoreError) and not self._refused:
            self._refused = True
            _log.error("the store refuses quota scripts", extra={"reason": str(error)})


class _LocalShare:
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
            replace(line, cost=min(line.cost, int(buckets[line.name].burst))) for line in lines
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
