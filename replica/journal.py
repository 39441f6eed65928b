"""What is told of a request when it has ended: a line of the log, and its spans.

    POST /v1/…      from its head to the end of its reply; its parent is the gateway's `forward`
      wait          until a place in the batch was free, and its adapter in a slot
        load        of that wait, what its adapter took to come there; from which tier
      prefill       until its first token
      decode        until its last

Of several choices of one request the first to draw a token stands for all until then, and the last
to end after. There is never a word of the prompt or the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from replica.core import sequence as core
from replica.errors import ReplicaError
from shared import logs
from shared.clock import Clock, monotonic
from shared.messages import Usage
from shared.span_export import Span, Value
from shared.trace_context import TraceContext, TraceHeaders, read
from shared.tracing import Tracer

Which = Literal["none", "failed", "all"]
Outcome = Literal["ok", "cut", "failed", "refused"]
"""As in the gateway's bill; refused: the engine never heard of it."""

_NOTHING = Usage()


class Told:
    """One request, filled in as it goes."""

    __slots__ = (
        *("adapter", "digest", "outcome", "sequences", "usage", "why"),
        *("began_at", "context", "parent", "path"),
    )

    def __init__(
        self, path: str, context: TraceContext | None, parent: TraceContext | None, now: float
    ) -> None:
        self.path, self.context, self.parent, self.began_at = path, context, parent, now
        self.adapter = ""  # or the base's name
        self.digest = ""
        self.sequences: Sequence[core.Sequence] = ()
        self.usage = _NOTHING
        self.outcome: Outcome = "ok"
        self.why = ""

    def broke(self, error: ReplicaError) -> None:
        self.outcome = "failed" if self.sequences else "refused"
        self.why = error.reason or "internal"


class Journal:
    def __init__(
        self,
        which: Which,
        tracer: Tracer | None,
        lines: logs.RequestLines,
        clock: Clock = monotonic,
    ) -> None:
        self._all, self._failed = which == "all", which != "none"
        self._tracer = tracer
        self._lines = lines
        self._clock = clock

    @contextmanager
    def telling(self, path: str, headers: TraceHeaders) -> Iterator[Told]:
        """Of a request that came with these."""
        now, parent = self._clock(), read(headers)
        context = parent
        if self._tracer is not None:
            context, parent = self._tracer.begin(headers)
        logs.trace_id.set("" if context is None else context.trace)
        told = Told(path, context, parent, now)
        try:
            yield told
        except ReplicaError as error:
            told.broke(error)
            raise
        except (asyncio.CancelledError, ConnectionError):
            told.outcome = "cut"
            raise
        except Exception:
            told.outcome, told.why = "failed", "internal"
            raise
        finally:
            self._ended(told, self._clock())

    async def close(self) -> None:
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _ended(self, told: Told, now: float) -> None:
        if self._all or (self._failed and told.outcome == "failed"):
            self._lines.add(_line(told, now))
            self._lines.write()
        if self._tracer is not None and told.context is not None and told.context.sampled:
            self._tracer.end(told.context, _spans(told, self._tracer, told.context, now))


def _times(told: Told, now: float) -> dict[str, tuple[float, float]]:
    """When each stage that it came to began and ended."""
    if not told.sequences:
        return {}
    first = min(told.sequences, key=lambda seq: seq.first_at or now)
    stages = {"wait": (first.arrived_at, first.admitted_at or now)}
    if first.load is not None and first.load.ended_at > first.arrived_at:
        stages["load"] = (max(first.load.begun_at, first.arrived_at), first.load.ended_at)
    if first.admitted_at is not None:
        stages["prefill"] = (first.admitted_at, first.first_at or now)
    if first.first_at is not None:
        stages["decode"] = (first.first_at, max(seq.ended_at or now for seq in told.sequences))
    return stages


def _line(told: Told, now: float) -> dict[str, Value]:
    usage = told.usage
    line: dict[str, Value] = {
        "request_id": logs.request_id.get(),
        "adapter": told.adapter,
        "version": told.digest,
        "outcome": told.outcome,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    for stage, (began, ended) in _times(told, now).items():
        line[f"{stage}_s"] = round(ended - began, 6)
    line["total_s"] = round(now - told.began_at, 6)
    if told.context is not None:
        line["trace_id"] = told.context.trace
    if told.why:
        line["why"] = told.why
    if told.outcome == "failed":
        line["level"] = "warning"
    return line


def _spans(told: Told, tracer: Tracer, context: TraceContext, now: float) -> list[Span]:
    parent, usage = told.parent, told.usage
    about: dict[str, Value] = {
        "loraplex.request_id": logs.request_id.get(),
        "loraplex.outcome": told.outcome,
        "loraplex.cached_tokens": usage.cached_tokens,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if told.adapter:
        about |= {"loraplex.adapter": told.adapter, "gen_ai.request.model": told.adapter}
    if told.digest:
        about["loraplex.version"] = told.digest
    if told.why:
        about["error.type"] = told.why
    fault = (told.why or "failed") if told.outcome == "failed" else ""
    spans = [
        Span(
            f"POST {told.path}",
            context.span_id,
            0 if parent is None else parent.span_id,
            told.began_at,
            now,
            about,
            "server",
            fault,
            remote=parent is not None,
        )
    ]
    above = {"load": tracer.span_id()}  # the wait, which it is a part of
    for stage, (began, ended) in _times(told, now).items():
        own = above["load"] if stage == "wait" else tracer.span_id()
        detail = _detail(stage, told)
        spans.append(Span(stage, own, above.get(stage, context.span_id), began, ended, detail))
    return spans


def _detail(stage: str, told: Told) -> dict[str, Value]:
    match stage:
        case "load":
            tiers = {str(seq.load.tier) for seq in told.sequences if seq.load is not None}
            return {"loraplex.tier": ",".join(sorted(tiers))}
        case "decode":
            preemptions = sum(seq.preemptions for seq in told.sequences)
            return {
                "gen_ai.usage.output_tokens": told.usage.completion_tokens,
                "loraplex.preemptions": preemptions,
            }
        case _:
            return {}
