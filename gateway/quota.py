"""What a tenant may still use: one reservation over all its limits, all or nothing.

A limit of n a minute is a bucket with burst n that refills at n / 60 a second. `reserve` takes one
request and the estimated tokens; `settle` later corrects the tokens by actual minus reserved. Laws:

- Exact across gateways: one script decides over all limits, on the server's clock.
- A refused call takes nothing, and its `retry_after_s` is true if nobody else takes meanwhile.
- An estimate is clipped to the limit: a small budget admits a request that names no max_tokens,
  and what it really used may leave the tenant in debt, which the next requests wait for.
- A request pays for itself even when it fails later; its tokens are settled at what was generated.

A busy tenant far from its limits spends small blocks that were reserved ahead, so that most of its
requests need no call; what that leaves of the laws above is in gateway/ahead.py.

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
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from gateway.ahead import Ahead
from gateway.config import QuotaConfig
from gateway.limits import (
    Answer,
    Limit,
    LimitLine,
    LimitState,
    Line,
    answer_of,
    header_lines,
    lines_of,
    state_of,
)
from gateway.local_share import LocalShare
from gateway.store.redis import Store, StoreAway, StoreError, Word
from gateway.tenants import Tenant, bucket_key
from shared import tasks
from shared.clock import Clock, monotonic
from shared.ids import RequestId, TenantId

__all__ = ["Denied", "Granted", "LimitLine", "LimitState", "Quota", "Reservation"]

_log = logging.getLogger(__name__)

_SETTLE_S: Final = 0.2  # corrections gathered before one is sent per tenant and limit
_AWAY_S: Final = 0.5  # between looks whether the store is back
_STALE_S: Final = 1.0  # what is owed for longer than this refills meanwhile
_BATCH_MAX: Final = 64  # requests in one call of the script: some 0.2 ms of the store's time


@dataclass(slots=True)
class Reservation:
    """What one request took; settled once, however often `settle` is called."""

    tenant: TenantId
    request: RequestId
    tokens: int  # the estimate, clipped to the limit
    tokens_per_min: int | None
    settled: bool = False


class Granted(NamedTuple):
    answer: Answer
    reservation: Reservation

    @property
    def state(self) -> LimitState:
        return state_of(self.answer)

    @property
    def headers(self) -> str:
        """The tenant's limits, as header lines."""
        return header_lines(self.answer)


@dataclass(frozen=True, slots=True)
class Denied:
    state: LimitState
    limit: Limit
    retry_after_s: float
    never: bool = False  # the limit is 0: waiting does not help

    @property
    def headers(self) -> str:
        return self.state.lines()


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


class _Batch(NamedTuple):
    """Calls for the same limits of one tenant, which the store answers in one."""

    tenant: Tenant
    calls: list[tuple[Sequence[Line], asyncio.Future[Answer]]]


class Quota:
    def __init__(self, store: Store, config: QuotaConfig, clock: Clock = monotonic) -> None:
        self._store = store
        self._clock = clock
        self._refused = False  # the store is there, but answers with errors
        self._local = LocalShare(config.local_share)
        self._owed: dict[tuple[TenantId, Limit], _Owed] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asked: dict[tuple[object, ...], _Batch] = {}  # in this turn of the loop
        self._ahead = Ahead(store, saw=self._local.saw, give_back=self._return, clock=clock)

    @property
    def degraded(self) -> bool:
        """Decisions are this gateway's own, not exact across gateways."""
        return self._store.away or self._refused

    async def reserve(self, tenant: Tenant, request: RequestId, tokens: int) -> Granted | Denied:
        """Take one request and `tokens` (input and output, estimated) from the tenant's limits."""
        if (granted := self.take(tenant, request, tokens)) is not None:
            return granted
        limits = tenant.limits
        lines = lines_of(limits, tokens)
        if limits.requests_per_min == 0 or limits.tokens_per_min == 0:
            blocked = next(line for line in lines if line.limit == 0)
            return Denied(await self.peek(tenant), blocked.name, 60.0, never=True)
        answer = await self._answer(tenant, lines)
        if answer.refuses is not None:
            return Denied(state_of(answer), answer.refuses.name, answer.wait_s)
        if not self.degraded:
            self._ahead.saw(tenant, answer)
        return _granted(tenant, request, answer, tokens)

    def take(self, tenant: Tenant, request: RequestId, tokens: int) -> Granted | None:
        """`reserve` at once, out of what was reserved ahead; None: the store has to be asked."""
        answer = self._ahead.take(tenant, tokens)
        return None if answer is None else _granted(tenant, request, answer, tokens)

    def put_back(self, tenant: Tenant, granted: Granted) -> None:
        """As if `take` had not been called."""
        self._ahead.put_back(tenant, granted.answer)

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
        free = [line._replace(cost=0) for line in lines_of(tenant.limits, 0)]
        return state_of(await self._answer(tenant, free))

    async def close(self) -> None:
        """Send what is owed, if the store takes it now."""
        self._ahead.close()
        await self._pay()
        if self._timer is not None:
            self._timer.cancel()

    async def _answer(self, tenant: Tenant, lines: Sequence[Line]) -> Answer:
        if not lines:
            return Answer((), ())
        loop = asyncio.get_running_loop()
        key = (tenant.id, tenant.limits.requests_per_min, tenant.limits.tokens_per_min)
        if not self._asked:
            loop.call_soon(self._ask)
        future: asyncio.Future[Answer] = loop.create_future()
        self._asked.setdefault(key, _Batch(tenant, [])).calls.append((lines, future))
        try:
            return await future
        except asyncio.CancelledError:
            if not future.cancelled():  # the answer came just as the client left
                self._give_back(tenant, future.result())
            raise

    def _ask(self) -> None:
        """What one turn of the loop asked of one tenant's limits goes as one call of the script."""
        asked, self._asked = self._asked, {}
        for tenant, calls in asked.values():
            for at in range(0, len(calls), _BATCH_MAX):
                batch = _Batch(tenant, calls[at : at + _BATCH_MAX])
                words: list[Word] = [""]
                for line in batch.calls[0][0]:
                    words += (line.name, line.limit, line.cost)
                words += [line.cost for lines, _ in batch.calls[1:] for line in lines]
                keys = [bucket_key(tenant.id)]
                self._store.ask("reserve", keys, words, partial(self._answered, batch))

    def _answered(self, batch: _Batch, reply: list[bytes] | StoreAway) -> None:
        tenant, calls = batch
        if isinstance(reply, StoreAway):
            self._note(reply)
            for lines, future in calls:
                self._tell(tenant, future, self._decide_alone(tenant, lines, owe=not reply.sent))
            return
        self._refused = False
        each = len(reply) // len(calls)
        for at, (lines, future) in enumerate(calls):
            answer = answer_of(lines, reply[at * each : (at + 1) * each])
            self._tell(tenant, future, answer)
        self._local.saw(tenant, answer, self._clock())

    def _tell(self, tenant: Tenant, future: asyncio.Future[Answer], answer: Answer) -> None:
        if not future.done():
            future.set_result(answer)
        else:
            self._give_back(tenant, answer)

    def _give_back(self, tenant: Tenant, answer: Answer) -> None:
        """Who asked has left: its tokens go back."""
        for line in answer.lines if answer.refuses is None else ():
            if line.name == "tokens":
                self._local.settle(tenant.id, "tokens", -line.cost, self._clock())
                self._return(tenant, line)

    def _decide_alone(self, tenant: Tenant, lines: Sequence[Line], *, owe: bool) -> Answer:
        now = self._clock()
        answer = self._local.take(tenant, lines, now)
        if owe and answer.refuses is None:
            for line in answer.lines:
                self._owe(tenant.id, line, now)
        return answer

    # paying what is owed

    def _return(self, tenant: Tenant, line: Line) -> None:
        self._owe(tenant.id, line._replace(cost=-line.cost), self._clock())

    def _owe(self, tenant: TenantId, line: Line, now: float) -> None:
        if line.cost == 0:
            return
        owed = self._owed.get((tenant, line.name))
        if owed is None:
            owed = self._owed[tenant, line.name] = _Owed(line.limit, now)
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


def _granted(tenant: Tenant, request: RequestId, answer: Answer, tokens: int) -> Granted:
    per_min = tenant.limits.tokens_per_min
    taken = answer.lines[-1].cost if per_min is not None else tokens
    return Granted(answer, Reservation(tenant.id, request, taken, per_min))
