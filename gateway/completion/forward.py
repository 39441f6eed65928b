"""One request to one replica, its reply back to the client; another replica while that is safe.

Law: a request is sent on to another replica only while no event of its answer has reached the
client, at most `attempts` times in all, and while the retry budget of the whole gateway lasts.
After the first event a failure is told inside the stream, and nothing is repeated.

How the replica behaved is told with the end of each attempt: a refused or broken connection makes
it suspect at once, faults in a row eject it (gateway/core/health.py).

The parts of an attempt that need no waiting (`begin`, `ended`) are the short way's too
(completion/short_way.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import orjson

from gateway.completion.errand import Errand
from gateway.completion.failures import BUSY, AttemptFailed, busy, exchange_failed
from gateway.completion.refusal import refusal
from gateway.config import ForwardConfig
from gateway.core.dispatcher import Conduct, Kind, Placement
from gateway.core.retry_budget import RetryBudget
from gateway.edge.exchange import UpstreamError
from gateway.edge.relay import Relay
from gateway.edge.rename import renamed_whole
from gateway.edge.reply import Reply
from gateway.edge.upstream import Upstream
from gateway.errors import ModelNotFound, ReplicaLost
from gateway.fleet.dialect import Dialect
from gateway.fleet.pump import Lease, Refused
from gateway.metrics import Metrics
from shared.clock import Clock, monotonic
from shared.ids import ReplicaId
from shared.wire import (
    ADAPTER_VERSION,
    CACHE_SALT,
    FLEET_TOKEN,
    PLACEMENT,
    QUEUE_MS,
    REPLICA,
    REQUEST_ID,
    decode_usage,
)

_log = logging.getLogger(__name__)

FIRST_COMMENT_S: Final = 1.0
"""A stream that has to wait, in the queue or for its adapter, says so after this."""

_LOADS: Final = (Kind.SPILL, Kind.COLD)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a replica may say nothing: before the first byte of a reply, and within it."""

    first_byte_s: float
    idle_s: float


class Forwarder:
    def __init__(
        self,
        upstreams: Mapping[ReplicaId, Upstream],
        *,
        config: ForwardConfig,
        token: str,
        metrics: Metrics,
        timeouts: Mapping[ReplicaId, Timeouts],
        dialects: Mapping[ReplicaId, Dialect],
        clock: Clock = monotonic,
    ) -> None:
        self._upstreams = upstreams
        self._config = config
        self._timeouts = timeouts
        self._dialects = dialects
        self._budget = RetryBudget(
            share=config.retry_share, floor=config.retry_floor, window_s=config.retry_window_s
        )
        self._token = f"{FLEET_TOKEN}: {token}\r\n" if token else ""
        self._metrics = metrics
        self._clock = clock

    async def run(self, errand: Errand, lease: Lease, failed: AttemptFailed | None = None) -> None:
        """Answer the client, or raise a GatewayError that the caller tells it.

        `failed`: how its first attempt has ended already."""
        if failed is None:
            self.saw()
        for left in reversed(range(self._config.attempts)):
            try:
                if failed is not None:
                    raise failed
                await self._attempt(errand, lease)
                return
            except AttemptFailed as failure:
                error, errand.conduct, failed = failure.error, failure.conduct, None
                replica = lease.placement.replica
                _log.warning(
                    "replica did not answer",
                    extra={"replica": replica, "why": error.message, "left": left},
                )
                if not failure.elsewhere or not left or not self._may_retry():
                    raise error from None
                try:
                    await lease.retry(replica, failure.conduct)
                except Refused:
                    raise error from None
                errand.conduct = None
                self._metrics.retries.labels(error.reason).inc()

    def saw(self) -> None:
        """One more request, for the retry budget."""
        self._budget.saw(self._clock())

    def begin(
        self, errand: Errand, placement: Placement, answered: Callable[[], None]
    ) -> tuple[Upstream, bytes, Relay, Timeouts]:
        """What an attempt at this replica takes. `answered` is called at the first event."""
        stages, trace = errand.traced.stages, errand.traced.lines
        if stages is not None:
            trace = stages.placed(placement, self._clock())
        errand.placed(placement)
        _announce(errand.reply, placement)
        if placement.kind in _LOADS:
            errand.reply.wait_visibly(FIRST_COMMENT_S)
        replica, ask = placement.replica, errand.ask
        upstream, body, lines = self._upstreams[replica], ask.body, self._token
        if (dialect := self._dialects.get(replica)) is not None:
            lines = dialect.lines
            body = dialect.completion(body, errand.target.adapter, placement.digest)
        relay = Relay(
            errand.reply,
            stream=ask.stream,
            keep_usage=ask.keep_usage,
            clock=self._clock,
            asked=ask.model,
            answered=answered,
        )
        head = (
            f"POST {upstream.prefix}{errand.path} HTTP/1.1\r\nhost: {upstream.host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{REQUEST_ID}: {errand.request}\r\n{lines}"
        )
        if not self._config.share_prefixes:
            head += f"{CACHE_SALT}: {errand.tenant.id}\r\n"
        request = b"".join((head.encode(), errand.passed, trace, b"\r\n", body))
        if stages is not None:
            stages.sent(self._clock())
        return upstream, request, relay, self._timeouts[replica]

    def ended(self, errand: Errand, relay: Relay, failure: UpstreamError | None) -> None:
        """The exchange is over: the client has its answer, or AttemptFailed is raised."""
        self._over(errand, relay, failure)
        if failure is not None and not relay.finished:
            told = relay.first_at is not None
            raise exchange_failed(failure, errand.request, told=told) from failure
        errand.conduct = (
            _end_stream(relay, errand) if relay.live else self._end_whole(relay, errand)
        )

    def dropped(self, errand: Errand, relay: Relay) -> None:
        """The client has left: what the replica did was done for it."""
        errand.estimate(errand.ask.input_tokens, 0)
        self._over(errand, relay, None)

    def _over(self, errand: Errand, relay: Relay, failure: UpstreamError | None) -> None:
        errand.reply.release()
        errand.count(relay)
        if errand.traced.stages is not None:
            fault = "" if failure is None or relay.finished else type(failure).__name__
            errand.traced.stages.exchanged(relay.first_at, relay.status, fault, self._clock())

    def _may_retry(self) -> bool:
        granted = self._budget.take(self._clock())
        if not granted:
            self._metrics.retries_denied.inc()
        return granted

    async def _attempt(self, errand: Errand, lease: Lease) -> None:
        upstream, request, relay, limits = self.begin(errand, lease.placement, lease.answered)
        failure = None
        try:
            await upstream.exchange(
                request, relay, first_byte_s=limits.first_byte_s, idle_s=limits.idle_s
            )
        except UpstreamError as error:
            failure = error
        except asyncio.CancelledError:
            self.dropped(errand, relay)
            raise
        self.ended(errand, relay, failure)

    def _end_whole(self, relay: Relay, errand: Errand) -> Conduct:
        body, ask = relay.content, errand.ask
        payload = _object(body)
        if relay.status in BUSY:
            conduct = Conduct.BUSY if relay.status in (429, 503) else Conduct.FAULTY
            raise AttemptFailed(busy(relay.headers), conduct, elsewhere=True)
        if relay.status == 404 and errand.target.adapter is not None:
            errand.outcome = "refused"  # it has just lost the adapter, or never had what "*" passed
            raise AttemptFailed(ModelNotFound(ask.model), Conduct.WELL, elsewhere=True)
        if relay.status >= 300 or relay.status < 200:
            return _refuse(relay, body, payload, errand)
        if payload is None:
            lost = ReplicaLost("The replica's reply was not a JSON object.")
            raise AttemptFailed(lost, Conduct.FAULTY, elsewhere=True)
        errand.outcome = "ok"
        errand.count_whole(decode_usage(payload.get("usage")), len(body), self._clock())
        if payload.get("model", ask.model) != ask.model:
            body = renamed_whole(body, ask.model)
        errand.reply.whole(relay.status, relay.headers, body)
        return Conduct.WELL


def _announce(reply: Reply, placement: Placement) -> None:
    choice, queue_ms = placement.choice, placement.queue_s * 1000
    where = _place_lines(choice.replica, choice.kind, choice.digest)
    reply.place = f"{where}{QUEUE_MS}: {queue_ms:.1f}\r\n"


@lru_cache(maxsize=4096)
def _place_lines(replica: ReplicaId, kind: Kind, digest: str) -> str:
    version = f"{ADAPTER_VERSION}: {digest}\r\n" if digest else ""
    return f"{REPLICA}: {replica}\r\n{PLACEMENT}: {kind}\r\n{version}"


def _end_stream(relay: Relay, errand: Errand) -> Conduct | None:
    if relay.finished:
        errand.outcome = "ok"
        return Conduct.WELL
    if not relay.told_error():
        error = ReplicaLost("The replica ended its stream before it was complete.")
        raise AttemptFailed(error, Conduct.FAULTY, elsewhere=relay.first_at is None)
    errand.reply.end()  # the error has passed already; close without [DONE]
    return None  # whose fault it was is not told


def _refuse(relay: Relay, body: bytes, payload: dict[str, Any] | None, errand: Errand) -> Conduct:
    """The replica refused the request: its own words if they are an error of an API, else ours."""
    ours_to_fix = relay.status in (401, 403) or relay.status < 400
    faulty = ours_to_fix or relay.status >= 500
    if ours_to_fix or (told := refusal(relay.status, payload)) is None:
        raise AttemptFailed(
            ReplicaLost(f"The replica could not serve this request (status {relay.status})."),
            Conduct.FAULTY if faulty else Conduct.WELL,
            elsewhere=False,
        )
    if relay.status < 500:
        errand.outcome = "refused"
    reply = errand.reply
    if reply.begun:
        reply.end(b"data: " + orjson.dumps(told) + b"\n\n")
    else:
        body = body if told == payload else orjson.dumps(told)
        reply.whole(relay.status, relay.headers, body)
    return Conduct.FAULTY if faulty else Conduct.WELL


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
