"""Spans on their way to a collector: a bounded queue, and a thread that speaks OTLP/HTTP.

Law: `add` costs an append, never waits and never fails; what the collector does not take in time,
or what comes while the queue is full, is lost and counted. OpenTelemetry is imported here and
nowhere else, when the first exporter is made.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit

from shared.clock import monotonic, wall
from shared.settings import BadSettings
from shared.trace_context import TraceContext

_log = logging.getLogger(__name__)

Kind = Literal["internal", "server", "client"]
Value = str | int | float | bool

_SIGNAL_PATH: Final = "/v1/traces"
_GATHER_S: Final = 1.0
_BATCH_MAX: Final = 64  # traces: encoding holds the interpreter, for a moment each
_CLOSE_S: Final = 2.0


class Span(NamedTuple):
    """One stage of one request. Times are monotonic seconds."""

    name: str
    span_id: int
    parent_id: int  # 0: it has none
    began_at: float
    ended_at: float
    attributes: Mapping[str, Value] = {}
    kind: Kind = "internal"
    error: str = ""
    remote: bool = False  # its parent is another process's


class SpanExport:
    def __init__(
        self, endpoint: str, *, service: str, instance: str, queue_max: int, timeout_s: float
    ) -> None:
        """Raises BadSettings when OpenTelemetry is not installed."""
        exporter = export_library()
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what it says, we say once
        path = "" if urlsplit(endpoint).path.strip("/") else _SIGNAL_PATH
        self._exporter = exporter.OTLPSpanExporter(endpoint.rstrip("/") + path, timeout=timeout_s)
        self._make = _maker(service, instance)
        self._endpoint = endpoint
        self._queue: deque[tuple[TraceContext, Sequence[Span], float]] = deque()
        self._queue_max = queue_max
        self._wake = threading.Event()
        self._stopping = False
        self._refused = False
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()
        self.lost = 0
        """Traces that came while the queue was full."""
        self.not_taken = 0
        """Traces that the collector did not take."""

    def add(self, context: TraceContext, spans: Sequence[Span]) -> None:
        """All spans of one request that has ended."""
        if len(self._queue) >= self._queue_max:
            self.lost += 1
            return
        self._queue.append((context, spans, wall() - monotonic()))
        if len(self._queue) >= _BATCH_MAX:
            self._wake.set()

    def close(self) -> None:
        """Send what waits, for `_CLOSE_S` at most."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()  # ends a wait for its next attempt

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(_GATHER_S)
            self._wake.clear()
            while many := min(_BATCH_MAX, len(self._queue)):
                self._send([self._queue.popleft() for _ in range(many)])

    def _send(self, traces: list[tuple[TraceContext, Sequence[Span], float]]) -> None:
        spans = [
            self._make(context, span, offset_s)
            for context, spans, offset_s in traces
            for span in spans
        ]
        taken = self._exporter.export(spans).name == "SUCCESS"
        if not taken:
            self.not_taken += len(traces)
        if taken == self._refused:  # news
            self._refused = not taken
            counts = {"endpoint": self._endpoint, "lost": self.lost + self.not_taken}
            if taken:
                _log.info("the collector takes spans again", extra=counts)
            else:
                _log.warning("the collector does not take spans", extra=counts)


def export_library() -> ModuleType:
    """Raises BadSettings, with what to do, when it is not installed."""
    try:
        return import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise BadSettings(
            f"tracing.endpoint: {error}; install it by `pip install 'loraplex[tracing]'`"
        ) from error


def _maker(service: str, instance: str) -> Callable[[TraceContext, Span, float], Any]:
    """Of OpenTelemetry's own spans, by their plain values and what to add to monotonic time."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
    from opentelemetry.trace.span import TraceState

    release = version("loraplex")
    scope = InstrumentationScope("loraplex", release)
    resource = Resource.create(
        {
            "service.name": service,
            "service.instance.id": instance,
            "service.version": release,
        }
    )
    kinds = {
        "internal": SpanKind.INTERNAL,
        "server": SpanKind.SERVER,
        "client": SpanKind.CLIENT,
    }

    def make(context: TraceContext, span: Span, offset_s: float) -> Any:
        flags, state = TraceFlags(context.flags), TraceState.from_header([context.state])

        def of(span_id: int, *, remote: bool) -> SpanContext:
            return SpanContext(context.trace_id, span_id, remote, flags, state)

        return ReadableSpan(
            span.name,
            of(span.span_id, remote=False),
            parent=of(span.parent_id, remote=span.remote) if span.parent_id else None,
            resource=resource,
            attributes=dict(span.attributes),
            kind=kinds[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=int((span.began_at + offset_s) * 1e9),
            end_time=int((max(span.ended_at, span.began_at) + offset_s) * 1e9),
            instrumentation_scope=scope,
        )

    return make
