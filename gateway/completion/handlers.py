"""HTTP in: how a completion passes from key to bill.

Order of a completion: key (401) -> body (413, 400) -> model (404) -> quota (429) -> fair queue
(429, 503) -> replica. Nothing is written before the status is sure; a stream that then has to
wait is begun early with comments, and what fails later is told inside it. Whatever was taken is
settled in one `finally`, also when the client leaves. The last bytes of a reply go out when its
record is on disk. A request that has to wait for none of this goes a shorter way through the same
steps (completion/short_way.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from secrets import token_hex
from typing import Any, Final

from aiohttp import web

from gateway.completion import ask as asks
from gateway.completion.auth import Door
from gateway.completion.errand import Errand, Settlement
from gateway.completion.failures import AttemptFailed
from gateway.completion.forward import FIRST_COMMENT_S, Forwarder
from gateway.completion.idempotency import HEADER as IDEMPOTENCY_KEY
from gateway.completion.idempotency import Claim, Idempotency
from gateway.completion.journal import Journal
from gateway.completion.passage import Means
from gateway.completion.refusals import RETRY_S, not_placed, over_quota
from gateway.completion.running import Running
from gateway.completion.short_way import CLIENT_REQUEST_ID, ShortWay
from gateway.completion.stages import Traced
from gateway.config import GatewayConfig
from gateway.edge.framework import Asked, Written, reply_to
from gateway.edge.front import Call
from gateway.edge.rename import renamed
from gateway.edge.reply import Reply
from gateway.errors import (
    GatewayError,
    InsufficientQuota,
    Internal,
    KeyReused,
    NoReplica,
    QuotaExceeded,
    ShuttingDown,
)
from gateway.fleet.names import resolve
from gateway.fleet.pump import Lease, Pump, Refused
from gateway.metrics import Metrics
from gateway.state.ledger import Ledger
from gateway.state.quota import Denied, Granted, Quota
from gateway.state.registry import Registry
from gateway.state.tenants import Tenant
from shared import logs
from shared.clock import Clock, monotonic
from shared.ids import RequestId
from shared.messages import Usage
from shared.wire import REQUEST_ID

_log = logging.getLogger(__name__)

_IDEMPOTENCY_KEY: Final = IDEMPOTENCY_KEY.lower()
_CLIENT_ID_MAX: Final = 512  # into the log, so that both names can be found there


class Handlers:
    def __init__(
        self,
        *,
        config: GatewayConfig,
        registry: Registry,
        door: Door,
        quota: Quota,
        ledger: Ledger,
        pump: Pump,
        forwarder: Forwarder,
        idempotency: Idempotency,
        metrics: Metrics,
        journal: Journal,
        clock: Clock = monotonic,
    ) -> None:
        self._config = config
        self._journal = journal
        self._registry = registry
        self._door = door
        self._quota = quota
        self._pump = pump
        self._dispatcher = pump.dispatcher
        self._forwarder = forwarder
        self._idempotency = idempotency
        self._metrics = metrics
        self._clock = clock
        self._settlement = Settlement(
            quota=quota,
            prices=registry.price,
            ledger=ledger,
            metrics=metrics,
            journal=journal,
            clock=clock,
        )
        self._prefix = f"req_{token_hex(8)}"  # of this process, then a number
        self._count = 0
        self.running: Final = Running()
        means = Means(
            door=door,
            quota=quota,
            prices=registry.price,
            pump=pump,
            forwarder=forwarder,
            settlement=self._settlement,
            journal=journal,
            running=self.running,
            keepalive_s=config.forward.keepalive_s,
            named=self._named,
            understood=self._understood,
            gone_on=self._gone_on,
            tell=self._tell,
        )
        self.short: Final = ShortWay(means)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.completions)
        app.router.add_post("/v1/completions", self.completions)

    # Completions --------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """One that aiohttp has read."""
        reply = reply_to(request, stall_s=self._config.forward.idle_timeout_s)
        await self.serve(Asked(request, self._config.listen), reply)
        return Written(keep_alive=reply.reusable)

    async def serve(self, call: Call, reply: Reply) -> None:
        """Answer, whatever happens; raises only when the client has left."""
        request = self._named()
        reply.headers[REQUEST_ID] = request
        await self._guarded(reply, request, self._complete(call, reply, request))

    async def _guarded(
        self, reply: Reply, request: RequestId, work: Coroutine[Any, Any, None]
    ) -> None:
        logs.request_id.set(request)
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            await work
        except GatewayError as error:
            self._tell(reply, error)
        except asyncio.CancelledError:
            if not self.running.ending:  # the client left
                raise
            task.uncancel()
            self._tell(reply, ShuttingDown())
        except ConnectionError:
            raise
        except Exception:
            _log.exception("request failed")
            self._tell(reply, Internal())
        finally:
            reply.let_go()
            reply.close()
            self.running.remove(task)

    async def _complete(self, call: Call, reply: Reply, request: RequestId) -> None:
        traced = self._journal.begun(call.trace)
        logs.trace_id.set("" if traced.context is None else traced.context.trace)
        try:
            if self.running.draining:
                raise ShuttingDown()
            if theirs := call.header(CLIENT_REQUEST_ID):
                _log.info("request named", extra={"client_request_id": theirs[:_CLIENT_ID_MAX]})
            tenant = self._door.admit(call.header, reply.peer)
            body = await call.read()
            errand = self._understood(tenant, call, body, reply, request, traced)
        except GatewayError as error:
            self._journal.turned_away(request, call.path, traced, error.reason)
            raise
        await self._pass(errand, call)

    async def _pass(self, errand: Errand, call: Call) -> None:
        tenant, target, reply = errand.tenant, errand.target, errand.reply
        stages, stream = errand.traced.stages, errand.ask.stream
        if target.name != errand.ask.model:
            body = renamed(errand.ask.body, target.name)
            errand.ask = errand.ask._replace(body=body)
        claim: Claim | None = None
        try:
            if (key := call.header(_IDEMPOTENCY_KEY)) is not None:
                claim = await self._idempotency.claim(tenant.id, key, errand.request)
            errand.granted = await self._admit(errand)
            if stages is not None:
                stages.admitted(self._clock())
            if stream:
                reply.keep_awake(self._config.forward.keepalive_s)
            waits = partial(reply.wait_visibly, FIRST_COMMENT_S)
            await self._carry_out(
                errand, self._pump.lease(errand.arrival, version=target.version, waits=waits)
            )
        except GatewayError as error:
            errand.why = error.reason
            if isinstance(error, QuotaExceeded | InsufficientQuota | KeyReused):
                errand.outcome = "refused"
            raise
        finally:
            if claim is not None and errand.outcome != "ok":
                claim.release()
            self._settlement.now(errand)

    async def _gone_on(self, errand: Errand, lease: Lease, error: Exception | None) -> None:
        """With one that came the short way so far."""
        await self._guarded(errand.reply, errand.request, self._rest(errand, lease, error))

    async def _rest(self, errand: Errand, lease: Lease, error: Exception | None) -> None:
        try:
            await self._carry_out(errand, lease, error)
        except GatewayError as told:
            errand.why = told.reason
            raise
        finally:
            self._settlement.now(errand)

    async def _carry_out(
        self, errand: Errand, lease: Lease, error: Exception | None = None
    ) -> None:
        """`error`: how its first attempt has ended already."""
        try:
            async with lease:
                try:
                    if not (error is None or isinstance(error, AttemptFailed)):
                        raise error
                    await self._forwarder.run(errand, lease, error)
                finally:
                    usage, lease.conduct = errand.usage, errand.conduct
                    lease.settle(usage.prompt_tokens, usage.completion_tokens)
        except Refused as refused:
            errand.outcome = "refused"
            raise not_placed(refused.why, errand.ask.model) from None
        except asyncio.CancelledError:
            if not errand.reply.ended:
                errand.outcome = "failed" if self.running.ending else "cut"
            raise

    def _named(self) -> RequestId:
        self._count += 1
        return RequestId(f"{self._prefix}{self._count:016x}")

    def _understood(
        self,
        tenant: Tenant,
        call: Call,
        body: bytes,
        reply: Reply,
        request: RequestId,
        traced: Traced,
    ) -> Errand:
        """What is asked for, checked; its last bytes will wait for the bill."""
        arrived_at = self._clock()
        ask = asks.parse(body, default_max_tokens=self._config.forward.default_max_tokens)
        if not self._dispatcher.bases():
            raise NoReplica("No replica has reported yet; retry soon.", retry_after_s=RETRY_S)
        target = resolve(
            ask.model,
            self._dispatcher,
            partial(self._registry.may_use, tenant),
            current=self._registry.current,
        )
        reply.held = True
        path, passed = call.path, call.passed
        return Errand(request, tenant, ask, target, reply, arrived_at, path, passed, traced=traced)

    async def _admit(self, errand: Errand) -> Granted:
        likely = Usage(errand.ask.input_tokens, errand.ask.output_tokens)
        name = errand.target.name
        answer = await self._quota.reserve(
            errand.tenant,
            errand.request,
            likely.total_tokens,
            output_tokens=likely.completion_tokens,
            spend=self._registry.price(errand.tenant.id, name).of(likely),
            model=name,
        )
        errand.reply.lines = answer.headers
        if isinstance(answer, Denied):
            raise over_quota(answer)
        return answer

    def _tell(self, reply: Reply, error: GatewayError) -> None:
        self._metrics.rejects.labels(error.reason).inc()
        reply.refuse(error)
