"""The spans of one sampled request: where its time went, stage by stage.

    POST /v1/…            from its head to the end of its reply
      admit               whose key is it, what is asked, may it pass
      queue               until its turn came and a replica had room      ┐
      route               which replica, and the request made for it      │ once each attempt
      forward             at the replica, whose own spans are below this  │
        first_token       until the first event, or all of a plain reply  │
        stream            until the last                                  ┘

One that ends early ends in the stage it had come to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.core.dispatcher import Placement
from shared.span_export import Span, Value
from shared.trace_context import TraceContext
from shared.tracing import Tracer


class Stages:
    """Every method is told the present time, and closes the stage that was open."""

    def __init__(
        self, tracer: Tracer, context: TraceContext, parent: TraceContext | None, now: float
    ) -> None:
        self._tracer = tracer
        self._context = context
        self._parent = parent
        self._began = self._since = self._attempt_since = now
        self._open = "admit"
        self._spans: list[Span] = []
        self._kept = 0  # of the spans: those of attempts that have come to something
        self._forward = 0  # id of the span that the replica's are below
        self._place: Mapping[str, Value] = {}

    def admitted(self, now: float) -> None:
        self._close("queue", now)
        self._keep()

    def placed(self, placement: Placement, now: float) -> bytes:
        """An attempt begins; the header lines by which its replica knows whose it is."""
        del self._spans[self._kept :]  # the last one's connection was dead: it was none
        self._since, self._open = self._attempt_since, "queue"
        self._close("route", now)
        self._place = _place(placement)
        self._forward = self._tracer.span_id()
        return self._context.by(self._forward, sampled=True).headers.lines

    def sent(self, now: float) -> None:
        self._close("forward", now, self._place)

    def exchanged(self, first_at: float | None, status: int, fault: str, now: float) -> None:
        """The attempt is over."""
        sent_at, about = self._since, {**self._place, "http.response.status_code": status}
        token_at = now if first_at is None else first_at
        self._add("first_token", sent_at, token_at, parent=self._forward)
        if first_at is not None:
            self._add("stream", first_at, now, parent=self._forward)
        above = self._context.span_id
        self._spans.append(
            Span("forward", self._forward, above, sent_at, now, about, "client", fault)
        )
        self._since, self._open = now, ""
        self._keep()

    def ended(self, name: str, about: Mapping[str, Value], fault: str, now: float) -> None:
        """The request is over; `about` it as a whole."""
        if self._open:
            self._close("", now)
        parent = self._parent
        root = Span(
            name,
            self._context.span_id,
            0 if parent is None else parent.span_id,
            self._began,
            now,
            about,
            "server",
            fault,
            remote=parent is not None,
        )
        self._tracer.end(self._context, [root, *self._spans])

    def _close(self, then: str, now: float, about: Mapping[str, Value] | None = None) -> None:
        self._add(self._open, self._since, now, about)
        self._since, self._open = now, then

    def _keep(self) -> None:
        self._kept, self._attempt_since = len(self._spans), self._since

    def _add(
        self,
        name: str,
        began: float,
        ended: float,
        about: Mapping[str, Value] | None = None,
        parent: int = 0,
    ) -> None:
        above = parent or self._context.span_id
        self._spans.append(Span(name, self._tracer.span_id(), above, began, ended, about or {}))


class Traced(NamedTuple):
    """What a request has of tracing: its context, the header lines that go on as they are, and its
    spans, if it is sampled."""

    context: TraceContext | None = None
    lines: bytes = b""
    stages: Stages | None = None


UNTRACED = Traced()


def _place(placement: Placement) -> Mapping[str, Value]:
    chosen = next((one for one in placement.terms if one.replica == placement.replica), None)
    about: dict[str, Value] = {
        "loraplex.replica": placement.replica,
        "loraplex.placement": str(placement.kind),
    }
    if placement.digest:
        about["loraplex.version"] = placement.digest
    if chosen is not None:
        about["loraplex.expected_s"] = chosen.expected_s
        about["loraplex.tier"] = "" if chosen.tier is None else str(chosen.tier)
    return about
