"""HTTP in: how a completion passes from key to bill.

Order of a completion: key (401) -> body (413, 400) -> model (404) -> quota (429) -> fair queue
(429, 503) -> replica. Nothing is written before the status is sure; a stream that then has to
wait is begun early with comments, and what fails later is told inside it. Whatever was taken is
settled in one `finally`, also when the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from secrets import token_hex
from typing import Any, Final

from aiohttp import web

from gateway import ask as asks
from gateway.ask import Ask
from gateway.auth import authenticate, header_of
from gateway.body import read_body
from gateway.config import GatewayConfig, ListenConfig
from gateway.core.dispatcher import Arrival, RejectReason
from gateway.errors import (
    GatewayError,
    InsufficientQuota,
    Internal,
    KeyReused,
    ModelNotFound,
    NoReplica,
    QueueFull,
    QuotaExceeded,
    ShuttingDown,
    WaitExpired,
)
from gateway.forward import Forwarder, Tally
from gateway.front import Call
from gateway.idempotency import HEADER as IDEMPOTENCY_KEY
from gateway.idempotency import Claim, Idempotency
from gateway.ledger import Ledger, Record
from gateway.metrics import Metrics
from gateway.names import Target, resolve
from gateway.passing import passed_on
from gateway.pump import Pump, Refused
from gateway.quota import Denied, Granted, Quota
from gateway.registry import Registry
from gateway.rename import renamed
from gateway.reply import Reply, Written
from gateway.tenants import Tenant
from shared import logs
from shared.clock import Clock, monotonic, wall
from shared.ids import RequestId
from shared.wire import REQUEST_ID

_log = logging.getLogger(__name__)

_CLIENT_REQUEST_ID: Final = "x-client-request-id"  # into the log, so that both can be found there
_IDEMPOTENCY_KEY: Final = IDEMPOTENCY_KEY.lower()
_CLIENT_ID_MAX: Final = 512
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
        idempotency: Idempotency,
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
        self._idempotency = idempotency
        self._metrics = metrics
        self._clock = clock
        self._prefix = f"req_{token_hex(8)}"  # of this process, then a number
        self._count = 0
        self._active: set[asyncio.Task[Any]] = set()
        self._quiet = asyncio.Event()
        self._ending = False
        self.draining = False

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/chat/completions", self.completions)
        app.router.add_post("/v1/completions", self.completions)

    # Drain --------------------------------------------------------------------------------------

    async def drained(self) -> None:
        """Take nothing new; return when nothing runs any more."""
        self.draining = True
        if self._active:
            await self._quiet.wait()

    def end_all(self) -> None:
        """End what still runs, each with an error its client can read."""
        self._ending = True
        for task in self._active:
            task.cancel()

    # Completions --------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """One that aiohttp has read."""
        reply = Reply.to(request, stall_s=self._config.forward.idle_timeout_s)
        await self.serve(_Request(request, self._config.listen), reply)
        return Written(keep_alive=reply.reusable)

    async def serve(self, call: Call, reply: Reply) -> None:
        """Answer, whatever happens; raises only when the client has left."""
        self._count += 1
        request_id = RequestId(f"{self._prefix}{self._count:016x}")
        logs.request_id.set(request_id)
        reply.headers[REQUEST_ID] = request_id
        if theirs := call.header(_CLIENT_REQUEST_ID):
            _log.info("request named", extra={"client_request_id": theirs[:_CLIENT_ID_MAX]})
        task = asyncio.current_task()
        assert task is not None
        self._active.add(task)
        try:
            await self._complete(call, reply, request_id)
        except GatewayError as error:
            self._tell(reply, error)
        except asyncio.CancelledError:
            if not self._ending:  # the client left
                raise
            task.uncancel()
            self._tell(reply, ShuttingDown())
        except ConnectionError:
            raise
        except Exception:
            _log.exception("request failed")
            self._tell(reply, Internal())
        finally:
            reply.close()
            self._active.discard(task)
            if self.draining and not self._active:
                self._quiet.set()

    async def _complete(self, call: Call, reply: Reply, request_id: RequestId) -> None:
        if self.draining:
            raise ShuttingDown()
        arrived_at = self._clock()
        tenant = authenticate(call.header, self._registry)
        limits = self._config.forward
        ask = asks.parse(await call.read(), default_max_tokens=limits.default_max_tokens)
        target = self._resolve(tenant, ask.model)
        if target.name != ask.model:
            ask = ask._replace(body=renamed(ask.body, target.name))
        tally = Tally(arrived_at)
        granted: Granted | None = None
        claim: Claim | None = None
        try:
            if (key := call.header(_IDEMPOTENCY_KEY)) is not None:
                claim = await self._idempotency.claim(tenant.id, key, request_id)
            granted = await self._admit(tenant, request_id, ask, reply)
            if ask.stream:
                reply.keep_awake(limits.keepalive_s)
            arrival = Arrival(
                request=request_id,
                tenant=tenant.id,
                weight=tenant.weight,
                adapter=target.adapter,
                input_tokens=ask.input_tokens,
                output_tokens=ask.output_tokens,
                streams=ask.stream,
                base="" if target.adapter is not None else target.name,
            )
            async with self._pump.lease(arrival, version=target.version) as lease:
                try:
                    await self._forwarder.run(
                        lease,
                        ask,
                        reply,
                        tally,
                        path=call.path,
                        request_id=request_id,
                        passed=call.passed,
                    )
                finally:
                    lease.settle(tally.usage.prompt_tokens, tally.usage.completion_tokens)
        except Refused as refused:
            tally.outcome = "refused"
            raise _refusal(refused.why, ask.model) from None
        except (QuotaExceeded, InsufficientQuota, KeyReused):
            tally.outcome = "refused"
            raise
        except asyncio.CancelledError:
            if not reply.ended:
                tally.outcome = "failed" if self._ending else "cut"
            raise
        finally:
            if claim is not None and tally.outcome != "ok":
                claim.release()
            self._settle(granted, tenant, target.name, request_id, tally)

    def _resolve(self, tenant: Tenant, model: str) -> Target:
        if not self._dispatcher.bases():
            raise NoReplica("No replica has reported yet; retry soon.", retry_after_s=_RETRY_S)
        return resolve(model, self._dispatcher, partial(self._registry.may_use, tenant))

    async def _admit(
        self, tenant: Tenant, request_id: RequestId, ask: Ask, reply: Reply
    ) -> Granted:
        answer = await self._quota.reserve(tenant, request_id, ask.input_tokens + ask.output_tokens)
        reply.lines = answer.headers
        if isinstance(answer, Denied):
            if answer.never:
                raise InsufficientQuota(f"Your limit of {answer.limit} per minute admits nothing.")
            raise QuotaExceeded(
                f"Rate limit reached for {answer.limit} per minute; retry after the wait.",
                retry_after_s=answer.retry_after_s,
            )
        return answer

    def _settle(
        self,
        granted: Granted | None,
        tenant: Tenant,
        model: str,
        request_id: RequestId,
        tally: Tally,
    ) -> None:
        usage, total_s = tally.usage, self._clock() - tally.arrived_at
        if granted is not None:
            self._quota.settle(granted.reservation, usage.total_tokens)
        self._metrics.ended(
            tenant.id,
            model,
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
                adapter=model,
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

    def _tell(self, reply: Reply, error: GatewayError) -> None:
        self._metrics.rejects.labels(error.reason).inc()
        reply.refuse(error)


class _Request:
    """A call out of a request that aiohttp has read, but for its body."""

    def __init__(self, request: web.Request, limits: ListenConfig) -> None:
        self._request, self._limits = request, limits
        self.path, self.passed = request.path, passed_on(request.raw_headers)
        self.header = header_of(request)

    async def read(self) -> bytes:
        return await read_body(self._request, self._limits)


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
