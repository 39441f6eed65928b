"""Tracing: which requests leave spans, and where those go.

A request that is sampled notes what it did and when, and hands its spans over when it has ended
(`span_export`); every other one costs a number and a comparison, and none at all while no
collector is named. Spans tell stages, never tokens, and no text of any prompt.

Who is sampled is said by who began the trace (parent-based): where a `traceparent` came, its flag
counts; else a share `ratio` of the trace ids, by the same rule in each process, so that all who are
asked about one trace say the same. `per_s_max` bounds what this process spends on clients that want
every request sampled: of more, the context is passed on, and says so.
"""

from __future__ import annotations

import os
import random
import socket
from typing import Final

from pydantic import Field

from shared.clock import Clock, monotonic
from shared.settings import Settings
from shared.span_export import Span, SpanExport, export_library
from shared.trace_context import RANDOM, TraceContext, TraceHeaders, read

_RATIO_BITS: Final = 56  # the part of a trace id that W3C asks to be random
_RATIO_MASK: Final = (1 << _RATIO_BITS) - 1


class TracingConfig(Settings):
    endpoint: str = Field("", pattern=r"^(https?://\S+)?$")
    """OpenTelemetry collector that gets spans by OTLP/HTTP, as http://collector:4318; empty: none.
    Its keys are left to the environment (OTEL_EXPORTER_OTLP_HEADERS)."""
    ratio: float = Field(0.01, ge=0, le=1)
    """Share sampled of the traces that begin here; a client's `traceparent` speaks for itself."""
    per_s_max: float = Field(50, gt=0)
    """Requests sampled in a second, at most, whatever clients ask for."""
    queue_max: int = Field(1000, ge=1)
    """Requests whose spans may wait for the collector; those of more are lost."""
    timeout_s: float = Field(5, gt=0)
    """What the collector has not taken in this time is lost."""


class Tracer:
    """Decides, makes ids, and owns the way to the collector."""

    def __init__(
        self,
        config: TracingConfig,
        *,
        service: str,
        instance: str = "",
        clock: Clock = monotonic,
        dice: random.Random | None = None,
    ) -> None:
        """Raises BadSettings when OpenTelemetry is not installed."""
        self._least = int(config.ratio * (1 << _RATIO_BITS))
        self._per_s_max = config.per_s_max
        self._clock = clock
        self._dice = dice or random.Random()
        self._second = 0.0  # when the present one began
        self._in_second = 0
        self.export: Final = SpanExport(
            config.endpoint,
            service=service,
            instance=instance or f"{socket.gethostname()}-{os.getpid()}",
            queue_max=config.queue_max,
            timeout_s=config.timeout_s,
        )

    def begin(self, headers: TraceHeaders) -> tuple[TraceContext, TraceContext | None]:
        """Our context for a request that came with these, and its parent's, if it has any.

        `span_id` of ours is that of the request's own span, if it is sampled; else still its
        parent's, because there is no span between.
        """
        parent = read(headers)
        if parent is None:
            trace_id = self._dice.getrandbits(128) or 1
            wanted = trace_id & _RATIO_MASK < self._least
            ours = TraceContext(trace_id, 0, RANDOM)
        else:
            ours, wanted = parent, parent.sampled
        if wanted and self._may():
            return ours.by(self.span_id(), sampled=True), parent
        return ours.by(ours.span_id or self.span_id(), sampled=False), parent

    def span_id(self) -> int:
        return self._dice.getrandbits(64) or 1

    def end(self, context: TraceContext, spans: list[Span]) -> None:
        """The request has ended, and these are its spans."""
        self.export.add(context, spans)

    def close(self) -> None:
        """May take seconds: not for the event loop."""
        self.export.close()

    def _may(self) -> bool:
        now = self._clock()
        if now - self._second >= 1.0:
            self._second, self._in_second = now, 0
        self._in_second += 1
        return self._in_second <= self._per_s_max


def require_exporter(config: TracingConfig) -> None:
    """Raises BadSettings, with what to do, when spans are wanted and nothing can send them."""
    if config.endpoint:
        export_library()


def tracer_of(config: TracingConfig, *, service: str, instance: str = "") -> Tracer | None:
    """None: no collector is named. Raises BadSettings."""
    return Tracer(config, service=service, instance=instance) if config.endpoint else None
