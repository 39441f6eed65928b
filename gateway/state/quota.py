"""What a tenant may still use: one reservation over all its limits, all or nothing.

A limit of n a minute is a bucket with burst n that refills at n / 60 a second; a budget of a day or
a month is a sum that begins anew at midnight UTC; concurrency is a set of leases that end by
themselves. There are the tenant's, and beside them those of the tenant for one adapter. `reserve`
takes one request and its estimate; `settle` later corrects that by actual minus reserved. Laws:

- Exact across gateways: one script decides over all limits, on the server's clock.
- A refused call takes nothing, and its `retry_after_s` is true if nobody else takes meanwhile;
  only of concurrency it is a guess, since nobody knows when a running request ends.
- An estimate is clipped to a minute's limit, and a budget admits while anything is left of it: a
  small one admits a request that names no max_tokens, and what it really used may leave the tenant
  in debt, which the next requests wait for.
- A request pays for itself even when it fails later; its tokens are settled at what was generated.
- A busy tenant far from its limits spends small blocks that were reserved ahead, so that most of
  its requests need no call; what that leaves of the laws above is in state/ahead.py.
- In shadow mode all is decided and told, and nothing is refused; what would be takes nothing.

Store away or slow: the pure buckets of `core` decide on `local_share` of each limit, beginning at
the levels last seen, so that an outage is no gift. What they grant is owed to the store and
charged when it is back (state/debts.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from gateway.config import QuotaConfig
from gateway.state.ahead import Ahead
from gateway.state.debts import Debts
from gateway.state.grants import Denied, Granted, Reservation
from gateway.state.leases import Leases
from gateway.state.limits import Answer, LimitLine, Line, Need, Plan, answer_of, lines_left
from gateway.state.local_share import LocalShare
from gateway.state.tenants import Tenant
from gateway.store.redis import Store, StoreAway, StoreError, Word
from shared.clock import Clock, monotonic, wall
from shared.ids import RequestId, TenantId

__all__ = ["Denied", "Granted", "LimitLine", "Need", "Quota", "Reservation"]

_log = logging.getLogger(__name__)

_BATCH_MAX: Final = 64  # requests in one call of the script: some 0.2 ms of the store's time
_PLANS_MAX: Final = 10_000
_NEVER_S: Final = 60.0


class _Call(NamedTuple):
    request: RequestId
    costs: Sequence[int]
    future: asyncio.Future[tuple[Answer, Sequence[int]]]


class Quota:
    def __init__(
        self,
        store: Store,
        config: QuotaConfig,
        clock: Clock = monotonic,
        *,
        wall: Clock = wall,
        refused: Callable[[str, bool], None] = lambda limit, shadow: None,
    ) -> None:
        """`refused` is told the limit of every refusal, and whether it was only in shadow."""
        self._store = store
        self._clock = clock
        self._wall = wall
        self._shadow = config.shadow
        self._tell_refused = refused
        self._refused = False  # the store is there, but answers with errors
        self._leases = Leases(store, config.lease_s, self._note)
        self._local = LocalShare(config.local_share, self._leases.running, wall)
        self._debts = Debts(store, clock, self._note)
        self._ahead = Ahead(store, saw=self._local.saw, give_back=self._return, clock=clock)
        self._plans: dict[tuple[TenantId, str], Plan] = {}
        self._asked: dict[Plan, list[_Call]] = {}  # in this turn of the loop

    @property
    def degraded(self) -> bool:
        """Decisions are this gateway's own, not exact across gateways."""
        return self._store.away or self._refused

    async def reserve(
        self,
        tenant: Tenant,
        request: RequestId,
        tokens: int,
        *,
        output_tokens: int = 0,
        spend: int = 0,
        model: str = "",
    ) -> Granted | Denied:
        """Take one request and `tokens` (estimated; of them `output_tokens` output, `spend` their
        price) from the tenant's limits, and from those it has for `model`."""
        plan = self._plan(tenant, model)
        costs: Sequence[int] = plan.costs(Need(tokens - output_tokens, output_tokens, spend))
        if (ahead := self._ahead.take(plan, costs)) is not None:
            return Granted(ahead, Reservation(request, plan, costs), self._wall())
        if plan.blocked is not None:
            answer, _ = await self._answer(plan, RequestId(""), [0] * len(costs))
            denied = Denied(answer, plan.blocked, _NEVER_S, self._wall(), never=True)
        else:
            answer, costs = await self._answer(plan, request, costs)
            if answer.refuses is None:
                if not self.degraded:
                    self._ahead.saw(plan, answer, costs)
                return Granted(answer, Reservation(request, plan, costs), self._wall())
            denied = Denied(answer, answer.refuses, answer.wait_s, self._wall())
        shadow = self._shadow or tenant.shadow
        self._tell_refused(denied.limit, shadow)
        if not shadow:
            return denied
        return Granted(answer, Reservation(request, plan, (), settled=True), denied.at)

    def take(
        self,
        tenant: Tenant,
        request: RequestId,
        tokens: int,
        *,
        output_tokens: int = 0,
        spend: int = 0,
        model: str = "",
    ) -> Granted | None:
        """`reserve` at once, out of what was reserved ahead; None: the store has to be asked."""
        plan = self._plan(tenant, model)
        costs = plan.costs(Need(tokens - output_tokens, output_tokens, spend))
        answer = self._ahead.take(plan, costs)
        if answer is None:
            return None
        return Granted(answer, Reservation(request, plan, costs), self._wall())

    def put_back(self, granted: Granted) -> None:
        """As if `take` had not been called."""
        reservation = granted.reservation
        if not reservation.settled:
            reservation.settled = True
            self._ahead.put_back(reservation.plan, reservation.costs)

    def settle(
        self,
        reservation: Reservation,
        actual_tokens: int,
        *,
        output_tokens: int = 0,
        spend: int = 0,
    ) -> None:
        """Correct a grant by what was really used; never blocks, never raises."""
        if reservation.settled:
            return
        reservation.settled = True
        need = Need(actual_tokens - output_tokens, output_tokens, spend)
        self._correct(reservation, need)

    async def peek(self, tenant: Tenant, model: str = "") -> list[LimitLine]:
        """What is left, taking nothing."""
        plan = self._plan(tenant, model)
        answer, _ = await self._answer(plan, RequestId(""), [0] * len(plan.lines))
        return lines_left(answer, self._wall())

    async def close(self) -> None:
        """Send what is owed, if the store takes it now."""
        self._ahead.close()
        self._leases.close()
        await self._debts.close()

    # asking

    def _plan(self, tenant: Tenant, model: str) -> Plan:
        if model not in tenant.adapter_limits:
            model = ""
        key, now = (tenant.id, model), self._wall()
        plan = self._plans.get(key)
        if plan is None or plan.tenant is not tenant or now >= plan.until:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            plan = self._plans[key] = Plan(tenant, model, now, self._leases.lease_s)
        return plan

    async def _answer(
        self, plan: Plan, request: RequestId, costs: Sequence[int]
    ) -> tuple[Answer, Sequence[int]]:
        """And the costs as they were taken."""
        if not plan.lines:
            return Answer((), ()), costs
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._ask)
        call = _Call(request, costs, loop.create_future())
        self._asked.setdefault(plan, []).append(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            if not call.future.cancelled():  # the answer came just as the client left
                self._give_back(plan, request, *call.future.result())
            raise

    def _ask(self) -> None:
        """What one turn of the loop asked of one tenant's limits goes as one call of the script."""
        asked, self._asked = self._asked, {}
        for plan, calls in asked.items():
            for at in range(0, len(calls), _BATCH_MAX):
                batch = calls[at : at + _BATCH_MAX]
                words: list[Word] = [*plan.words]
                for request, costs, _ in batch:
                    words.append(request)
                    words += costs
                self._store.ask("reserve", plan.keys, words, partial(self._answered, plan, batch))

    def _answered(self, plan: Plan, calls: Sequence[_Call], reply: list[bytes] | StoreAway) -> None:
        if isinstance(reply, StoreAway):
            self._note(reply)
            for call in calls:
                self._tell(plan, call, *self._decide_alone(plan, call, owe=not reply.sent))
            return
        self._refused = False
        each = len(reply) // len(calls)
        for at, call in enumerate(calls):
            answer = answer_of(plan.lines, reply[at * each : (at + 1) * each])
            self._tell(plan, call, answer, call.costs)
        self._local.saw(answer, plan.tenant.id, self._clock())

    def _tell(self, plan: Plan, call: _Call, answer: Answer, costs: Sequence[int]) -> None:
        if answer.refuses is None and call.request:
            self._leases.take(plan.lines, call.request)
        if not call.future.done():
            call.future.set_result((answer, costs))
        else:
            self._give_back(plan, call.request, answer, costs)

    def _give_back(
        self, plan: Plan, request: RequestId, answer: Answer, costs: Sequence[int]
    ) -> None:
        """Who asked has left: all but its request goes back."""
        if answer.refuses is None:
            self._correct(Reservation(request, plan, costs), Need())

    def _correct(self, reservation: Reservation, actual: Need) -> None:
        plan, now = reservation.plan, self._clock()
        for line, cost in zip(plan.lines, reservation.costs, strict=True):
            delta = line.cost(actual) - cost
            if delta and line.kind != "lease" and line.name != "requests":
                self._local.settle(plan.tenant.id, line, delta, now)
                self._debts.owe(line, delta, now)
        self._leases.release(plan.lines, reservation.request)

    def _decide_alone(self, plan: Plan, call: _Call, *, owe: bool) -> tuple[Answer, Sequence[int]]:
        now = self._clock()
        answer, costs = self._local.take(plan, call.costs, now)
        if owe and answer.refuses is None:
            for line, cost in zip(plan.lines, costs, strict=True):
                self._debts.owe(line, cost, now)
        return answer, costs

    def _return(self, line: Line, rest: float) -> None:
        self._debts.owe(line, -rest, self._clock())

    def _note(self, error: StoreAway) -> None:
        if isinstance(error, StoreError) and not self._refused:
            self._refused = True
            _log.error("the store refuses quota scripts", extra={"reason": str(error)})
