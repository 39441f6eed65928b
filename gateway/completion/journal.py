"""What is told of a request when it has ended: a line of the log, and its spans.

Both say who, what, where and how long, and neither has a word of the prompt or the answer. The
lines of one turn of the event loop are one write; which requests get one is `log_requests`. One
that failed always costs a line, for somebody will ask; all of them are for those who want it so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Literal

from gateway.completion.stages import UNTRACED, Stages, Traced
from gateway.state.records import Record
from shared.clock import Clock, monotonic
from shared.logs import RequestLines
from shared.span_export import Value
from shared.trace_context import NO_TRACE, TraceHeaders, read
from shared.tracing import Tracer

Which = Literal["none", "failed", "all"]


class Journal:
    def __init__(
        self, which: Which, tracer: Tracer | None, lines: RequestLines, clock: Clock = monotonic
    ) -> None:
        self._all, self._failed = which == "all", which != "none"
        self._tracer = tracer
        self._lines = lines
        self._clock = clock

    def begun(self, headers: TraceHeaders) -> Traced:
        """A request has come, with these."""
        if self._tracer is None:
            return UNTRACED if headers is NO_TRACE else Traced(read(headers), headers.lines)
        context, parent = self._tracer.begin(headers)
        if not context.sampled:
            return Traced(context, context.headers.lines)
        return Traced(context, b"", Stages(self._tracer, context, parent, self._clock()))

    def turned_away(self, request: str, path: str, traced: Traced, why: str) -> None:
        """It was refused before it was known what it is about."""
        if self._all:
            self._write(traced, {"request_id": request, "outcome": "refused", "why": why})
            self.write()
        if traced.stages is not None:
            about: dict[str, Value] = {"loraplex.request_id": request, "error.type": why}
            traced.stages.ended(f"POST {path}", about, "", self._clock())

    def ended(self, record: Record, path: str, kind: str, traced: Traced, why: str) -> None:
        """`kind`: of its placement; `why`: the reason of its error, if it had one."""
        if self._all or (self._failed and record.outcome == "failed"):
            self._write(traced, _line(record, kind, why))
        if traced.stages is not None:
            fault = (why or "failed") if record.outcome == "failed" else ""
            about = _about(record, kind, why)
            traced.stages.ended(f"POST {path}", about, fault, self._clock())

    def write(self) -> None:
        self._lines.write()

    async def close(self) -> None:
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _write(self, traced: Traced, line: dict[str, Value]) -> None:
        if traced.context is not None:
            line["trace_id"] = traced.context.trace
        self._lines.add(line)


def _line(record: Record, kind: str, why: str) -> dict[str, Value]:
    line: dict[str, Value] = {
        "request_id": record.request,
        "tenant": record.tenant,
        "adapter": record.adapter,
        "version": record.digest,
        "replica": record.replica,
        "placement": kind,
        "outcome": record.outcome,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "queue_s": round(record.queue_s, 6),
        "first_token_s": round(record.first_token_s, 6),
        "total_s": round(record.total_s, 6),
    }
    if why:
        line["why"] = why
    if record.outcome == "failed":
        line["level"] = "warning"
    return line


def _about(record: Record, kind: str, why: str) -> Mapping[str, Value]:
    """OpenTelemetry's own names where it has them."""
    about: dict[str, Value] = {
        "gen_ai.request.model": record.adapter,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "loraplex.request_id": record.request,
        "loraplex.tenant": record.tenant,
        "loraplex.adapter": record.adapter,
        "loraplex.version": record.digest,
        "loraplex.replica": record.replica,
        "loraplex.placement": kind,
        "loraplex.outcome": record.outcome,
        "loraplex.cached_tokens": record.cached_tokens,
        "loraplex.tokens_estimated": record.estimated,
    }
    if why:
        about["error.type"] = why
    return {name: value for name, value in about.items() if value != ""}
