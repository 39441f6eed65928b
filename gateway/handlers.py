"""HTTP in: how a completion passes from key to bill.

Order of a completion: key (401) -> body (413, 400) -> model (404) -> quota (429) -> fair queue
(429, 503) -> replica. Nothing is written before the status is sure; a stream that then has to
wait is begun early with comments, and what fails later is told inside it. Whatever was taken is
settled in one `finally`, also when the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from secrets import token_hex
from typing import Any, Final

from aiohttp import web

from gateway import ask as asks
from gateway.ask import Ask
from gateway.auth import authenticate
from gateway.config import GatewayConfig
from gateway.core.dispatcher import Arrival, RejectReason
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayError,
    Internal,
    ModelNotFound,
    NoReplica,
    QueueFull,
    QuotaExceeded,
    ShuttingDown,
    WaitExpired,
)
from gateway.forward import Forwarder, Tally
from gateway.ledger import Ledger, Record
from gateway.metrics import Metrics
from gateway.pump import Pump, Refused
from gateway.quota import Denied, Granted, Quota
from gateway.registry import Registry
from gateway.reply import Reply, respond
from gateway.tenants import Tenant
from shared import logs
from shared.clock import Clock, monotonic, wall
from shared.ids import AdapterId, RequestId
from shared.wire import REQUEST_ID

_log = logging.getLogger(__name__)

_TRACE: Final = ("traceparent", "tracestate")
_RETRY_S: Final = 1.0  # for what usually passes in a moment


class Handlers:
    def __init__(
        self,
        *,
        config: GatewayConfig,
        registry: Registry,
        quota: Quota,
        ledger: Ledger,
        pump: Pump,
        forwarder: Forwarder,
        metrics: Metrics,
        clock: Clock = monotonic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._quota = quota
        self._ledger = ledger
        self._pump = pump
        self._dispatcher = pump.dispatcher
        self._forwarder = forwarder
        self._metrics = metrics
        self._clock = clock
        self._active: set[asyncio.Task[Any]] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._ending = False
        self.draining = False

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.completions)
        app.router.add_post("/v1/completions", self.completions)

    # Drain --------------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Take nothing new; return when nothing runs any more."""
        self.draining = True
        await self._quiet.wait()

    def end_all(self) -> None:
        """End what still runs, each with an error its client can read."""
        self._ending = True
        for task in self._active:
            task.cancel()

    # Completions --------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        request_id = RequestId(f"req_{token_hex(16)}")
        logs.request_id.set(request_id)
        reply = Reply(request, stall_s=self._config.forward.idle_timeout_s)
        reply.headers[REQUEST_ID] = request_id
        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        self._quiet.clear()
        try:
            await self._complete(request, reply, request_id)
        except GatewayError as error:
            return self._tell(reply, error)
        except asyncio.CancelledError:
            if not self._ending:  # the client left
                raise
            task.uncancel()
            return self._tell(reply, ShuttingDown())
        except ConnectionError:
            raise
        except Exception:
            _log.exception("request failed")
            return self._tell(reply, Internal())
        finally:
            written = reply.close()
            self._active.discard(task)
            if not self._active:
                self._quiet.set()
        return written

    async def _complete(self, request: web.Request, reply: Reply, request_id: RequestId) -> None:
        if self.draining:
            raise ShuttingDown()
        arrived_at = self._clock()
        tenant = authenticate(request, self._registry)
        limits = self._config.forward
        ask = asks.parse(await self._read(request), default_max_tokens=limits.default_max_tokens)
        adapter = self._resolve(tenant, ask.model)
        tally = Tally(arrived_at)
        granted: Granted | None = None
        try:
            granted = await self._admit(tenant, request_id, ask, reply)
            if ask.stream:
                reply.keep_awake(limits.keepalive_s)
            arrival = Arrival(
                request=request_id,
                tenant=tenant.id,
                weight=tenant.weight,
                adapter=adapter,
                input_tokens=ask.input_tokens,
                output_tokens=ask.output_tokens,
            )
            trace = {name: value for name in _TRACE if (value := request.headers.get(name))}
            async with self._pump.lease(arrival) as lease:
                try:
                    await self._forwarder.run(
                        lease,
                        ask,
                        reply,
                        tally,
                        path=request.path,
                        request_id=request_id,
                        trace=trace,
                    )
                finally:
                    lease.settle(tally.usage.prompt_tokens, tally.usage.completion_tokens)
        except Refused as refused:
            tally.outcome = "refused"
            raise _refusal(refused.why, ask.model) from None
        except QuotaExceeded:
            tally.outcome = "refused"
            raise
        except asyncio.CancelledError:
            if not reply.ended:
                tally.outcome = "failed" if self._ending else "cut"
            raise
        finally:
            self._settle(granted, tenant, ask, request_id, tally)

    async def _read(self, request: web.Request) -> bytes:
        most = self._config.listen.body_max_bytes
        too_large = BodyTooLarge(f"The body is larger than this server's limit of {most} bytes.")
        if (request.content_length or 0) > most:
            raise too_large
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except web.RequestPayloadError as error:
            raise BadRequest(f"The body could not be read: {error}") from None

    def _resolve(self, tenant: Tenant, model: str) -> AdapterId | None:
        """None is the base. Unknown and not permitted cannot be told apart."""
        bases = self._dispatcher.bases()
        if not bases:
            raise NoReplica("No replica has reported yet; retry soon.", retry_after_s=_RETRY_S)
        if not (self._dispatcher.knows(model) and self._registry.may_use(tenant, model)):
            raise ModelNotFound(model)
        return None if model in bases else AdapterId(model)

    async def _admit(
        self, tenant: Tenant, request_id: RequestId, ask: Ask, reply: Reply
    ) -> Granted:
        answer = await self._quota.reserve(tenant, request_id, ask.input_tokens + ask.output_tokens)
        reply.headers.update(answer.state.headers())
        if isinstance(answer, Denied):
            raise QuotaExceeded(
                f"Rate limit reached for {answer.limit} per minute; "
                + ("this limit admits no request." if answer.never else "retry after the wait."),
                retry_after_s=None if answer.never else answer.retry_after_s,
                should_retry=False if answer.never else None,
            )
        return answer

    def _settle(
        self,
        granted: Granted | None,
        tenant: Tenant,
        ask: Ask,
        request_id: RequestId,
        tally: Tally,
    ) -> None:
        usage, total_s = tally.usage, self._clock() - tally.arrived_at
        if granted is not None:
            self._quota.settle(granted.reservation, usage.total_tokens)
        self._metrics.ended(
            tenant.id,
            ask.model,
            tally.outcome,
            usage=usage,
            queue_s=tally.queue_s,
            first_token_s=tally.first_token_s,
            total_s=total_s,
        )
        self._ledger.record(
            Record(
                request=request_id,
                tenant=tenant.id,
                adapter=ask.model,
                digest=tally.digest,
                replica=tally.replica or "",
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                queue_s=tally.queue_s,
                first_token_s=tally.first_token_s or 0.0,
                total_s=total_s,
                outcome=tally.outcome,
                estimated=tally.estimated,
                at=wall(),
            )
        )

    def _tell(self, reply: Reply, error: GatewayError) -> web.StreamResponse:
        self._metrics.rejects.labels(error.reason).inc()
        if reply.begun:
            if not reply.ended:
                reply.end(error.event())
            return reply.close()
        return respond(error, reply.headers)


def _refusal(why: RejectReason, model: str) -> GatewayError:
    match why:
        case RejectReason.QUEUE_FULL:
            return QueueFull(
                "Too many of your requests are waiting; let some finish first.",
                retry_after_s=_RETRY_S,
            )
        case RejectReason.UNKNOWN_MODEL:
            return ModelNotFound(model)
        case RejectReason.EXPIRED:
            return WaitExpired("The request waited too long for a replica.", retry_after_s=_RETRY_S)
        case RejectReason.NO_REPLICA:
            return NoReplica("No replica can serve this model now.", retry_after_s=_RETRY_S)
