"""A plain request: what can be read in one way only, and so without a framework (edge/front.py).

Exactly one of the two request lines; a head of well-formed lines, no name given twice, nothing
about the connection or the body but one decimal `Content-Length`. What is not plain is not refused
here: it is nobody's business but the strict parser's.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.edge.passing import passed_on
from shared.trace_context import NO_TRACE, TraceHeaders

_PATHS: Final = {
    b"POST /v1/chat/completions HTTP/1.1": "/v1/chat/completions",
    b"POST /v1/completions HTTP/1.1": "/v1/completions",
}
_NAME: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_VALUE: Final = rb"[!-~](?:[\t -~]*[!-~])?|"
_FIELD: Final = re.compile(rb"(?m:^)(%b):[ \t]*(%b)[ \t]*\r\n" % (_NAME, _VALUE))
_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([0-9]{1,9})\r\n")
_JUDGED: Final = frozenset(
    (
        *(b"content-length", b"transfer-encoding", b"content-encoding"),
        *(b"expect", b"upgrade", b"te", b"trailer"),
        *(b"traceparent", b"tracestate"),  # those of usual form have been cut out before
    )
)
_TRACED: Final = re.compile(
    rb"(?i)\r\n(traceparent|tracestate):[ \t]*([!-~](?:[\t -~]*[!-~])?)[ \t]*(?=\r\n)"
)

_REMEMBERED_MAX: Final = 1024
_remembered: dict[bytes, Head] = {}  # in this process only: keys are among them


class Head(NamedTuple):
    """A plain head, but for the length of the body."""

    path: str
    fields: dict[str, str]  # by name in lower case
    passed: bytes
    trace: TraceHeaders = NO_TRACE


class Plain:
    """A plain request, whole."""

    __slots__ = ("body", "header", "passed", "path", "trace")

    def __init__(self, head: Head, body: bytes) -> None:
        self.path, fields, self.passed, self.trace = head
        self.header = fields.get
        self.body = body

    async def read(self) -> bytes:
        return self.body


def plain_head(head: bytes) -> tuple[Head, int] | None:
    """The head that ends before the empty line, its last line's end included, and the length of
    the body; None: not plain.

    But for that length, and the trace it belongs to, a client's heads are mostly the same, so the
    last ones are remembered.
    """
    length = _LENGTH.search(head)
    if length is None:
        return None
    rest = head[: length.start() + 2] + head[length.end() :]
    found = _remembered.get(rest)
    if found is None:
        rest, trace = _cut(rest)
        found = (_remembered.get(rest) if trace else None) or _learn(rest)
        if found is None:
            return None
        if trace:
            found = found._replace(trace=trace)
    return found, int(length[1])


def _cut(head: bytes) -> tuple[bytes, TraceHeaders | None]:
    """The head without its trace context, where it has one, and that; one given twice stays."""
    found = _TRACED.findall(head)
    named = {name.lower(): value.decode() for name, value in found}
    if not found or len(named) != len(found):
        return head, None
    trace = TraceHeaders(named.get(b"traceparent", ""), named.get(b"tracestate", ""))
    return _TRACED.sub(b"", head), trace


def _learn(head: bytes) -> Head | None:
    found = _read(head)
    if found is not None:
        if len(_remembered) >= _REMEMBERED_MAX:
            _remembered.clear()
        _remembered[head] = found
    return found


def _read(head: bytes) -> Head | None:
    """Without its `Content-Length`; with another one it is not plain."""
    line, _, text = head.partition(b"\r\n")
    path = _PATHS.get(line)
    raw = _FIELD.findall(text)
    fields = {name.lower(): value for name, value in raw}
    if (
        path is None
        or len(raw) != text.count(b"\n")  # a line is no field
        or len(fields) != len(raw)  # a name is given twice
        or not fields.keys().isdisjoint(_JUDGED)
        or b"host" not in fields
        or fields.get(b"connection", b"keep-alive").lower() != b"keep-alive"
    ):
        return None
    return Head(
        path, {name.decode(): value.decode() for name, value in fields.items()}, passed_on(raw)
    )
