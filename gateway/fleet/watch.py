"""Follow one replica's report stream: the stream is the residency feed and the heartbeat.

Every line is a whole snapshot, so a broken stream costs freshness, not truth: the replica is lost
to the dispatcher at once and back with its first report. A silence of `silence_heartbeats` of the
heartbeats it promised ends the stream; then exchanges that were silent as long are ended too,
because nobody else would notice a host that is gone without a word.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from gateway.edge.exchange import (
    ConnectFailed,
    Flow,
    Headers,
    ReplyTimeout,
    ReplyUnfit,
    Sink,
    UpstreamError,
)
from gateway.edge.upstream import Upstream
from gateway.fleet.pump import Pump
from gateway.metrics import Metrics
from shared.framing import Lines
from shared.ids import ReplicaId
from shared.wire import FLEET_TOKEN, REPORTS_PATH, WireError, decode_report

_log = logging.getLogger(__name__)

FIRST_REPORT_S: Final = 5.0
BACKOFF_MIN_S: Final = 0.2


class Watch:
    def __init__(
        self,
        replica: ReplicaId,
        upstream: Upstream,
        pump: Pump,
        *,
        token: str,
        silence_heartbeats: float,
        metrics: Metrics,
        probe_s: float = 1.0,
    ) -> None:
        """`probe_s`: the longest pause before it is asked again."""
        self._replica = replica
        self._upstream = upstream
        self._probe_s = probe_s
        self._pump = pump
        self._token = token
        self._silence_heartbeats = silence_heartbeats
        self._metrics = metrics
        self._silence_s = FIRST_REPORT_S

    async def run(self) -> None:
        """Until cancelled: follow, and after each break follow again, soon."""
        pause_s = BACKOFF_MIN_S
        while True:
            reports = _Reports(self._replica, self._pump, self._metrics, self._silence_heartbeats)
            why = await self._follow(reports)
            if reports.heard:  # before its first report it is unknown, and stays so
                self._pump.replica_lost(self._replica)
                pause_s = BACKOFF_MIN_S
            level = logging.WARNING if reports.heard else logging.DEBUG
            _log.log(level, "reports ended", extra={"replica": self._replica, "why": why})
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._probe_s)

    async def _follow(self, reports: _Reports) -> str:
        """One stream to its end; why it ended."""
        limit_s = self._silence_s
        try:
            await self._upstream.exchange(
                self._request(), reports, first_byte_s=limit_s, idle_s=limit_s
            )
        except UpstreamError as error:
            if reports.heard:
                self._silence_s = reports.silence_s
            if isinstance(error, (ReplyTimeout, ConnectFailed)):
                self._upstream.abandon(self._silence_s, "the replica fell silent")
            return str(error)
        return "the replica ended the stream"

    def _request(self) -> bytes:
        token = f"{FLEET_TOKEN}: {self._token}\r\n" if self._token else ""
        return (
            f"GET {self._upstream.prefix}{REPORTS_PATH} HTTP/1.1\r\n"
            f"host: {self._upstream.host}\r\n{token}\r\n"
        ).encode()


class _Reports(Sink):
    """The sink of one report stream."""

    def __init__(
        self, replica: ReplicaId, pump: Pump, metrics: Metrics, silence_heartbeats: float
    ) -> None:
        self._replica = replica
        self._pump = pump
        self._counts = {
            result: metrics.reports.labels(replica, result)
            for result in ("applied", "stale", "unreadable", "foreign")
        }
        self._silence_heartbeats = silence_heartbeats
        self._lines = Lines()
        self._flow: Flow | None = None
        self.heard = False
        self.silence_s = FIRST_REPORT_S

    def head(self, status: int, headers: Headers, flow: Flow) -> None:
        if status in (401, 403):
            raise ReplyUnfit("the replica wants a fleet token: set fleet.token to its own")
        if status != 200:
            raise ReplyUnfit(f"the replica answered {REPORTS_PATH} with status {status}")
        self._flow = flow

    def body(self, data: bytes) -> bool:
        for line in self._lines.feed(data):
            self._counts[self._take(line)].inc()
        return False

    def _take(self, line: bytes) -> str:
        try:
            report = decode_report(line)
        except WireError as error:
            _log.warning("unreadable report", extra={"replica": self._replica, "why": str(error)})
            return "unreadable"
        if report.replica != self._replica:
            _log.error(
                "the replica has another name than the configuration gives it; make them equal",
                extra={"replica": self._replica, "its_name": report.replica},
            )
            return "foreign"
        self.heard = True
        self.silence_s = self._silence_heartbeats * report.heartbeat_s
        assert self._flow is not None
        self._flow.limit_silence(self.silence_s)
        return "applied" if self._pump.report(report) else "stale"
