"""One request to one replica, its reply back to the client; another replica while that is safe.

Law: a request is sent on to another replica only while no event of its answer has reached the
client, at most `attempts` times in all, and while the retry budget of the whole gateway lasts.
After the first event a failure is told inside the stream, and nothing is repeated.

How the replica behaved is told with the end of each attempt: a refused or broken connection makes
it suspect at once, faults in a row eject it (gateway/core/health.py).

`Tally` is filled in as the request goes, so that the bill is right however it ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import orjson

from gateway.ask import Ask
from gateway.config import ForwardConfig
from gateway.connection import (
    UpstreamError,
)
from gateway.core.cost import estimate_tokens
from gateway.core.dispatcher import Conduct, Kind, Placement
from gateway.core.retry_budget import RetryBudget
from gateway.errors import ReplicaLost
from gateway.failures import BUSY, AttemptFailed, busy, exchange_failed
from gateway.ledger import Outcome
from gateway.metrics import Metrics
from gateway.pump import Lease, Refused
from gateway.relay import Relay
from gateway.rename import renamed_whole
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


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a replica may say nothing: before the first byte of a reply, and within it."""

    first_byte_s: float
    idle_s: float


_NOTHING: Final = Usage()


@dataclass(slots=True)
class Tally:
    """What one request came to."""

    arrived_at: float
    outcome: Outcome = "failed"
    replica: ReplicaId | None = None
    boot: str = ""
    digest: str = ""
    queue_s: float = 0.0
    first_token_s: float | None = None
    usage: Usage = _NOTHING
    estimated: bool = False

    def placed(self, placement: Placement) -> None:
        self.replica, self.digest = placement.replica, placement.digest
        self.boot = placement.boot
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


class Forwarder:
    def __init__(
        self,
        upstreams: Mapping[ReplicaId, Upstream],
        *,
        config: ForwardConfig,
        token: str,
        metrics: Metrics,
        timeouts: Mapping[ReplicaId, Timeouts],
        clock: Clock = monotonic,
    ) -> None:
        self._upstreams = upstreams
        self._config = config
        self._timeouts = timeouts
        self._budget = RetryBudget(
            share=config.retry_share, floor=config.retry_floor, window_s=config.retry_window_s
        )
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
        passed: bytes,
    ) -> None:
        """Answer the client, or raise a GatewayError that the caller tells it."""
        self._budget.saw(self._clock())
        for left in reversed(range(self._config.attempts)):
            placement = lease.placement
            tally.placed(placement)
            _announce(reply, placement)
            upstream = self._upstreams[placement.replica]
            request = self._request(upstream, path, ask.body, request_id, passed)
            try:
                await self._attempt(upstream, request, lease, ask, reply, tally)
                return
            except AttemptFailed as failure:
                error, lease.conduct = failure.error, failure.conduct
                _log.warning(
                    "replica did not answer",
                    extra={"replica": placement.replica, "why": error.message, "left": left},
                )
                if not failure.elsewhere or not left or not self._may_retry():
                    raise error from None
                try:
                    await lease.retry(placement.replica, failure.conduct)
                except Refused:
                    raise error from None
                lease.conduct = None
                self._metrics.retries.labels(error.reason).inc()

    def _may_retry(self) -> bool:
        granted = self._budget.take(self._clock())
        if not granted:
            self._metrics.retries_denied.inc()
        return granted

    async def _attempt(
        self,
        upstream: Upstream,
        request: bytes,
        lease: Lease,
        ask: Ask,
        reply: Reply,
        tally: Tally,
    ) -> None:
        relay = Relay(
            reply,
            stream=ask.stream,
            keep_usage=ask.keep_usage,
            clock=self._clock,
            asked=ask.model,
            answered=lease.answered,
        )
        timeouts = self._timeouts[lease.placement.replica]
        try:
            await upstream.exchange(
                request,
                relay,
                first_byte_s=timeouts.first_byte_s,
                idle_s=timeouts.idle_s,
            )
        except UpstreamError as failure:
            if not relay.finished:
                raise exchange_failed(failure, told=relay.first_at is not None) from failure
        except asyncio.CancelledError:  # the client left: what the replica did was done for it
            tally.estimate(ask.input_tokens, 0)
            raise
        finally:
            reply.release()
            tally.count(relay, ask)
        if relay.live:
            lease.conduct = _end_stream(relay, reply, tally)
        else:
            lease.conduct = self._end_whole(relay, ask, reply, tally)

    def _end_whole(self, relay: Relay, ask: Ask, reply: Reply, tally: Tally) -> Conduct:
        body = relay.content
        payload = _object(body)
        if relay.status in BUSY:
            conduct = Conduct.BUSY if relay.status in (429, 503) else Conduct.FAULTY
            raise AttemptFailed(busy(relay.headers), conduct, elsewhere=True)
        if relay.status >= 300 or relay.status < 200:
            return _refuse(relay, body, payload, reply, tally)
        if payload is None:
            lost = ReplicaLost("The replica's reply was not a JSON object.")
            raise AttemptFailed(lost, Conduct.FAULTY, elsewhere=True)
        tally.outcome = "ok"
        tally.first_token_s = self._clock() - tally.arrived_at
        usage = decode_usage(payload.get("usage"))
        if usage is not None:
            tally.usage = usage
        else:
            tally.estimate(ask.input_tokens, estimate_tokens(len(body)))
        if payload.get("model", ask.model) != ask.model:
            body = renamed_whole(body, ask.model)
        reply.whole(relay.status, relay.headers, body)
        return Conduct.WELL

    def _request(
        self,
        upstream: Upstream,
        path: str,
        body: bytes,
        request_id: RequestId,
        passed: bytes,
    ) -> bytes:
        """`passed`: the client's own headers, such as may be (gateway/passing.py)."""
        head = (
            f"POST {upstream.prefix}{path} HTTP/1.1\r\nhost: {upstream.host}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"{REQUEST_ID}: {request_id}\r\n{self._token}"
        )
        return b"".join((head.encode(), passed, b"\r\n", body))


def _announce(reply: Reply, placement: Placement) -> None:
    choice, queue_ms = placement.choice, placement.queue_s * 1000
    where = _place_lines(choice.replica, choice.kind, choice.digest)
    reply.place = f"{where}{QUEUE_MS}: {queue_ms:.1f}\r\n"


@lru_cache(maxsize=4096)
def _place_lines(replica: ReplicaId, kind: Kind, digest: str) -> str:
    version = f"{ADAPTER_VERSION}: {digest}\r\n" if digest else ""
    return f"{REPLICA}: {replica}\r\n{PLACEMENT}: {kind}\r\n{version}"


def _end_stream(relay: Relay, reply: Reply, tally: Tally) -> Conduct | None:
    if relay.finished:
        tally.outcome = "ok"
        return Conduct.WELL
    if not relay.told_error():
        error = ReplicaLost("The replica ended its stream before it was complete.")
        raise AttemptFailed(error, Conduct.FAULTY, elsewhere=relay.first_at is None)
    reply.end()  # the error has passed already; close without [DONE]
    return None  # whose fault it was is not told


def _refuse(
    relay: Relay, body: bytes, payload: dict[str, Any] | None, reply: Reply, tally: Tally
) -> Conduct:
    """The replica refused the request: its own words if they are an OpenAI error, else ours."""
    ours_to_fix = relay.status in (401, 403) or relay.status < 400
    faulty = ours_to_fix or relay.status >= 500
    if ours_to_fix or payload is None or not isinstance(payload.get("error"), dict):
        raise AttemptFailed(
            ReplicaLost(f"The replica could not serve this request (status {relay.status})."),
            Conduct.FAULTY if faulty else Conduct.WELL,
            elsewhere=False,
        )
    if relay.status < 500:
        tally.outcome = "refused"
    if reply.begun:
        reply.end(b"data: " + orjson.dumps(payload) + b"\n\n")
    else:
        reply.whole(relay.status, relay.headers, body)
    return Conduct.FAULTY if faulty else Conduct.WELL


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
