"""The fast path: a replica's bytes go to the client's transport inside the read that brought them.

Why it exists: a streamed reply is some hundred chunks, and a coroutine wake-up and a framework
write for each cost more than the whole request (bench/gateway: 53 µs a chunk against 22). Here a
read of the replica is one call, one search for usage, one write to the client; the only future of
the request is its exchange's.

Only whole events pass, otherwise untouched, except that the usage event a client did not ask for
is left out, and that `model` is the name that was asked for. Events are looked into only where the
text says that they tell usage. A chunk of one event that tells none passes in the frame it came in;
where `model` has to be corrected it begins, up to there, as the one before did (`opening`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import orjson

from gateway.edge.exchange import Flow, Headers, ReplyTooLong, ReplyUnfit, Sink
from gateway.edge.rename import correction, opening, renamed_events
from gateway.edge.reply import Reply
from shared.clock import Clock
from shared.framing import Events, event_at, event_data
from shared.messages import Usage
from shared.wire import decode_usage

WHOLE_MAX_BYTES: Final = 32 << 20
"""A plain reply is kept until it is whole; a longer one is refused."""

_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')  # not `"usage":null`, which is in every chunk


_CHUNK_MAX: Final = 1 << 16
_SIZES: Final[dict[int, bytes]] = {}  # by length of a whole chunk: its size line, if it is plain


class Relay(Sink):
    """The sink of one exchange: events pass to the client, any other reply is kept whole."""

    def __init__(
        self,
        reply: Reply,
        *,
        stream: bool,
        keep_usage: bool,
        clock: Clock,
        asked: str = "",
        answered: Callable[[], None] | None = None,
    ) -> None:
        """`asked`: the name that `model` in each event shall have; "": as it comes.

        `answered` is called once, at the first data event.
        """
        self._reply = reply
        self._stream = stream
        self._keep_usage = keep_usage
        self._clock = clock
        self._asked = asked
        self._answered = answered
        self._wrong = self._right = b""  # how the replica writes `model`, and how it should be
        self._opening = self._reopening = b""  # the same, from the beginning of its last chunk
        self._events = Events()
        self._last = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._flow: Flow | None = None
        self.status = 0
        self.headers: Headers = []
        self.live = False
        """Events are passing; otherwise the reply is kept in `content`."""
        self.finished = False
        """`[DONE]` has passed: whatever happens now, the reply was a success."""
        self.usage: Usage | None = None
        self.data_events = 0
        self.first_at: float | None = None
        """When the first data event passed; until then another replica may be tried."""

    def head(self, status: int, headers: Headers, flow: Flow) -> None:
        self.status, self.headers, self._flow = status, headers, flow
        if status == 200 and self._stream:
            kind = next((value for name, value in headers if name == b"content-type"), b"")
            if not kind.startswith(b"text/event-stream"):
                raise ReplyUnfit(f"asked for a stream, got {kind.decode('latin1')!r}")
            self.live = self.takes_chunks = True

    def body(self, data: bytes) -> bool:
        if not self.live:
            self._size += len(data)
            if self._size > WHOLE_MAX_BYTES:
                raise ReplyTooLong(f"a plain reply of more than {WHOLE_MAX_BYTES} bytes")
            self._parts.append(data)
            return False
        blob = self._events.feed(data)
        if b'"usage"' in blob and _USAGE.search(blob):
            blob = self._meter(blob)
        if not blob:
            return False
        if count := _data_events(blob):
            self.data_events += count
            if self.first_at is None:
                self.first_at = self._clock()
                if self._answered is not None:
                    self._answered()
                if self._asked:
                    self._wrong, self._right = correction(blob, self._asked)
        self.finished = blob[-16:].rstrip(b"\r\n").endswith(b"[DONE]")
        if self._wrong:
            blob = self._renamed(blob, count - self.finished)
        self._last = blob
        self._reply.events(blob, self.headers, self._flow, last=self.finished)
        return self.finished

    def chunk(self, data: bytes) -> bool:
        """The raw lane: one whole event that nobody needs to look into, passed in its own frame."""
        size_line = _SIZES.get(len(data)) or _size_line(len(data))
        if (
            not data.startswith(size_line)
            or not data.endswith(b"\n\n\r\n")
            or (b'"usage"' in data and _USAGE.search(data))
            or data.endswith(b"[DONE]\n\n\r\n")
            or data.count(b"\ndata:") != 1  # the size's line end is before it
            or self.first_at is None
            or self._events.rest
        ):
            return False
        passed = data
        if self._wrong:
            start = len(size_line)
            if not data.startswith(self._opening, start) or not self._opening:
                self._opening, self._reopening = opening(data[start:], self._asked)
            if self._opening:
                rest = data[start + len(self._opening) : -2]
                size = len(self._reopening) + len(rest)
                passed = b"%x\r\n%b%b\r\n" % (size, self._reopening, rest)
        if not self._reply.chunk(passed, self._flow):
            return False
        self._last = data
        self.data_events += 1
        return True

    @property
    def content(self) -> bytes:
        return b"".join(self._parts)

    def told_error(self) -> bool:
        """The replica ended its stream with an error event of its own."""
        last = self._last.rstrip(b"\r\n")  # of a raw chunk, its frame as well
        first, _ = event_at(last, len(last))
        payload = _json(event_data(last[first:]))
        return payload is not None and "error" in payload

    def _renamed(self, blob: bytes, events: int) -> bytes:
        """One `"model":"…"` an event is the event's own; else it must be looked for."""
        pieces = blob.split(self._wrong)
        if len(pieces) == events + 1:
            return self._right.join(pieces)
        return renamed_events(blob, self._asked)

    def _meter(self, blob: bytes) -> bytes:
        """Read the events that tell usage; leave out the one that tells only that."""
        kept, start, found = [], 0, _USAGE.search(blob)
        while found:
            first, last = event_at(blob, found.start())
            payload = _json(event_data(blob[first:last]))
            if payload is not None and (usage := decode_usage(payload.get("usage"))) is not None:
                self.usage = usage  # of usage told often, the last is the sum
                if not self._keep_usage and not payload.get("choices"):
                    kept.append(blob[start:first])
                    start = last
            found = _USAGE.search(blob, last)
        return b"".join((*kept, blob[start:])) if kept else blob


def _size_line(length: int) -> bytes:
    """Of a chunk that is so long as a whole, if its size is written without zeros before it."""
    for digits in range(1, 5):
        size = length - digits - 4
        if size > 0 and len(line := b"%x\r\n" % size) == digits + 2 and length < _CHUNK_MAX:
            _SIZES[length] = line
            return line
    return b"\n"  # no chunk begins so


def _data_events(blob: bytes) -> int:
    """A raw newline cannot stand inside an event's JSON; the engines write it on one line."""
    return blob.count(b"\ndata:") + blob.startswith(b"data:")


def _json(data: bytes | None) -> dict[str, object] | None:
    try:
        value = orjson.loads(data or b"null")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
