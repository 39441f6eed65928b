"""One request to one replica, its reply back to the client; another replica while that is safe.

Law: a request is sent on to another replica only while no event of its answer has reached the
client, at most `attempts` times in all. A refused connection makes the replica suspect at once.
After the first event a failure is told inside the stream, and nothing is repeated.

`Tally` is filled in as the request goes, so that the bill is right however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gateway.ask import Ask
from gateway.config import ForwardConfig
from gateway.connection import (
    ConnectFailed,
    Headers,
    ReplyLost,
    ReplyTimeout,
    ReplyTooLong,
    ReplyUnfit,
    UpstreamError,
)
from gateway.core.cost import estimate_tokens
from gateway.core.dispatcher import Placement
from gateway.errors import GatewayError, ReplicaBusy, ReplicaLost, ReplicaTimeout
from gateway.ledger import Outcome
from gateway.metrics import Metrics
from gateway.pump import Lease, Refused
from gateway.relay import Relay
from gateway.reply import Reply
from gateway.upstream import Upstream
from shared.clock import Clock, monotonic
from shared.ids import ReplicaId, RequestId
from shared.messages import Usage
from shared.wire import (
    ADAPTER_VERSION,
    FLEET_TOKEN,
    PLACEMENT,
    QUEUE_MS,
    REPLICA,
    REQUEST_ID,
    decode_usage,
)

_log = logging.getLogger(__name__)

BUSY: Final = frozenset({429, 502, 503, 504})
"""A replica that answers so may be fine later; another may be fine now."""

_BUSY_RETRY_S: Final = 1.0


@dataclass(slots=True)
class Tally:
    """What one request came to."""

    arrived_at: float
    outcome: Outcome = "failed"
    replica: ReplicaId | None = None
    digest: str = ""
    queue_s: float = 0.0
    first_token_s: float | None = None
    usage: Usage = field(default_factory=Usage)
    estimated: bool = False

    def placed(self, placement: Placement) -> None:
        self.replica, self.digest = placement.replica, placement.digest
        self.queue_s = placement.queue_s

    def count(self, relay: Relay, ask: Ask) -> None:
        """By the replica's own count, else by the events that passed."""
        if relay.first_at is not None:
            self.first_token_s = relay.first_at - self.arrived_at
        if relay.usage is not None:
            self.usage = relay.usage
        elif relay.data_events:
            self.estimate(ask.input_tokens, relay.data_events)

    def estimate(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        self.estimated = True


class _Elsewhere(Exception):
    """This replica did not answer, and nothing was told to the client: another may be asked."""

    def __init__(self, error: GatewayError, *, suspect: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.suspect = suspect


class Forwarder:
    def __init__(
        self,
        upstreams: Mapping[ReplicaId, Upstream],
        *,
        config: ForwardConfig,
        token: str,
        metrics: Metrics,
        clock: Clock = monotonic,
    ) -> None:
        self._upstreams = upstreams
        self._config = config
        self._token = f"{FLEET_TOKEN}: {token}\r\n" if token else ""
        self._metrics = metrics
        self._clock = clock

    async def run(
        self,
        lease: Lease,
        ask: Ask,
        reply: Reply,
        tally: Tally,
        *,
        path: str,
        request_id: RequestId,
        trace: Mapping[str, str],
    ) -> None:
        """Answer the client, or raise a GatewayError that the caller tells it."""
        for left in reversed(range(self._config.attempts)):
            placement = lease.placement
            tally.placed(placement)
            _announce(reply, placement)
            upstream = self._upstreams[placement.replica]
            request = self._request(upstream, path, ask.body, request_id, trace)
            try:
                return await self._attempt(upstream, request, ask, reply, tally)
            except _Elsewhere as failure:
                error = failure.error
                self._metrics.retries.labels(error.reason).inc()
                _log.warning(
                    "replica did not answer",
                    extra={"replica": placement.replica, "why": error.message, "left": left},
                )
                if not left:
                    raise error from None
                try:
                    await lease.retry(placement.replica, suspect=failure.suspect)
                except Refused:
                    raise error from None

    async def _attempt(
        self, upstream: Upstream, request: bytes, ask: Ask, reply: Reply, tally: Tally
    ) -> None:
        relay = Relay(reply, stream=ask.stream, keep_usage=ask.keep_usage, clock=self._clock)
        try:
            await upstream.exchange(
                request,
                relay,
                first_byte_s=self._config.first_byte_timeout_s,
                idle_s=self._config.idle_timeout_s,
            )
        except UpstreamError as failure:
            if not relay.finished:
                raise _failed(failure, relay) from failure
        except asyncio.CancelledError:  # the client left: what the replica did was done for it
            tally.estimate(ask.input_tokens, 0)
            raise
        finally:
            reply.release()
            tally.count(relay, ask)
        if relay.live:
            _end_stream(relay, reply, tally)
        else:
            self._end_whole(relay, ask, reply, tally)

    def _end_whole(self, relay: Relay, ask: Ask, reply: Reply, tally: Tally) -> None:
        body = relay.content
        payload = _object(body)
        if relay.status in BUSY:
            raise _Elsewhere(_busy(relay.headers), suspect=False)
        if relay.status >= 300 or relay.status < 200:
            return _refuse(relay, body, payload, reply, tally)
        if payload is None:
            lost = ReplicaLost("The replica's reply was not a JSON object.")
            raise _Elsewhere(lost, suspect=False)
        tally.outcome = "ok"
        tally.first_token_s = self._clock() - tally.arrived_at
        usage = decode_usage(payload.get("usage"))
        if usage is not None:
            tally.usage = usage
        else:
            tally.estimate(ask.input_tokens, estimate_tokens(len(body)))
        reply.whole(relay.status, relay.headers, body)

    def _request(
        self,
        upstream: Upstream,
        path: str,
        body: bytes,
        request_id: RequestId,
        trace: Mapping[str, str],
    ) -> bytes:
        """Headers are ours, not the client's: its key and cookies are not the replica's business,
        and nothing it sends may select weights, a cache or an encoding."""
        traced = "".join(f"{name}: {value}\r\n" for name, value in trace.items())
        head = (
            f"POST {upstream.prefix}{path} HTTP/1.1\r\nhost: {upstream.host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{REQUEST_ID}: {request_id}\r\n{self._token}{traced}\r\n"
        )
        return head.encode(errors="surrogateescape") + body


def _announce(reply: Reply, placement: Placement) -> None:
    reply.headers[REPLICA] = placement.replica
    reply.headers[PLACEMENT] = str(placement.kind)
    reply.headers[QUEUE_MS] = f"{placement.queue_s * 1000:.1f}"
    if placement.digest:
        reply.headers[ADAPTER_VERSION] = placement.digest


def _end_stream(relay: Relay, reply: Reply, tally: Tally) -> None:
    if relay.finished:
        tally.outcome = "ok"
    elif relay.told_error():  # it has passed already; close without [DONE]
        reply.end()
    else:
        error = ReplicaLost("The replica ended its stream before it was complete.")
        if relay.first_at is None:
            raise _Elsewhere(error, suspect=False)
        raise error


def _refuse(
    relay: Relay, body: bytes, payload: dict[str, Any] | None, reply: Reply, tally: Tally
) -> None:
    """The replica refused the request: its own words if they are an OpenAI error, else ours."""
    ours_to_fix = relay.status in (401, 403) or relay.status < 400
    if ours_to_fix or payload is None or not isinstance(payload.get("error"), dict):
        raise ReplicaLost(f"The replica could not serve this request (status {relay.status}).")
    if relay.status < 500:
        tally.outcome = "refused"
    if reply.begun:
        reply.end(b"data: " + orjson.dumps(payload) + b"\n\n")
    else:
        reply.whole(relay.status, relay.headers, body)


def _failed(failure: UpstreamError, relay: Relay) -> GatewayError | _Elsewhere:
    match failure:
        case ConnectFailed():
            error: GatewayError = ReplicaLost("The replica refused the connection.")
            suspect = True
        case ReplyTimeout():
            error, suspect = ReplicaTimeout("The replica did not answer in time."), False
        case ReplyUnfit():
            error, suspect = ReplicaLost("The replica's reply could not be used."), False
        case ReplyTooLong():  # it would be as long anywhere
            return ReplicaLost("The replica's reply was too long to pass on; ask for less.")
        case ReplyLost() | _:
            error, suspect = ReplicaLost("The connection to the replica was lost."), True
    _log.info("exchange failed", extra={"why": str(failure)})
    return error if relay.first_at is not None else _Elsewhere(error, suspect=suspect)


def _busy(headers: Headers) -> ReplicaBusy:
    told = next((value for name, value in headers if name == b"retry-after"), b"")
    wait_s = float(told) if told.isdigit() else _BUSY_RETRY_S
    return ReplicaBusy("Every replica that could serve this is busy.", retry_after_s=wait_s)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
