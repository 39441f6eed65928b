"""Trace context: whose trace a request belongs to, as W3C has it in `traceparent`, `tracestate`.

    traceparent: 00-<trace, 32 hex>-<parent span, 16 hex>-<flags, 2 hex>

A header that breaks the rules counts as none (W3C Trace Context §3.2), and `tracestate`, which is
its vendors' own, means nothing without it. Of the flags two are kept: bit 0, somebody before us
samples this trace; bit 1, its id is random.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 0x01
RANDOM: Final = 0x02


class TraceHeaders(NamedTuple):
    """Both headers as they came; "" where there is none."""

    parent: str = ""
    state: str = ""

    @property
    def lines(self) -> bytes:
        """As they came, for one more hop."""
        parent = f"{TRACEPARENT}: {self.parent}\r\n" if self.parent else ""
        state = f"{TRACESTATE}: {self.state}\r\n" if self.state else ""
        return (parent + state).encode()


NO_TRACE: Final = TraceHeaders()


class TraceContext(NamedTuple):
    trace_id: int  # 128 bits
    span_id: int  # 64 bits: who asks, and so the parent of what is done here
    flags: int
    state: str = ""

    @property
    def sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)

    @property
    def trace(self) -> str:
        """Its id as people and logs write it."""
        return f"{self.trace_id:032x}"

    def by(self, span_id: int, *, sampled: bool) -> TraceContext:
        """The same trace, one span further."""
        flags = self.flags & ~_SAMPLED | sampled
        return self._replace(span_id=span_id, flags=flags)

    @property
    def headers(self) -> TraceHeaders:
        return TraceHeaders(
            f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}", self.state
        )


def read(headers: TraceHeaders) -> TraceContext | None:
    """What they say; None when they say nothing that can be used."""
    found = _PARENT.fullmatch(headers.parent.strip())
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == "ff" or (version == "00" and rest) or not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, int(flags, 16) & (_SAMPLED | RANDOM), headers.state)
