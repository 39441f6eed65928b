"""NDJSON lines and SSE events out of a byte stream, sans-IO: `feed(bytes)` gives whole frames.

However the network splits the bytes, the frames are the same, and `b"".join(feed(...)) + rest`
is what came in. Both buffers are bounded: a peer that never ends a frame cannot take our memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_EVENT_END: Final = re.compile(rb"\n\n|\r\n\r\n")


class FrameTooLong(ValueError):
    """A frame passed its bound without ending."""


class Lines:
    """Newline-ended lines, newline removed, empty lines dropped."""

    __slots__ = ("_limit_bytes", "_rest")

    def __init__(self, *, limit_bytes: int = 16 << 20) -> None:
        self._rest = b""
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._limit_bytes:
            raise FrameTooLong(f"a line of more than {self._limit_bytes} bytes")
        return [line for line in lines if line.strip()]


class Events:
    """Whole SSE events as raw bytes, several at once.

    `feed` returns every complete event received so far as one blob (possibly empty) and keeps
    the unfinished tail: the data path forwards the blob as it is and never looks inside it.
    """

    __slots__ = ("_limit_bytes", "rest")

    def __init__(self, *, limit_bytes: int = 4 << 20) -> None:
        self.rest = b""
        self._limit_bytes = limit_bytes

    def feed(self, data: bytes) -> bytes:
        blob = self.rest + data if self.rest else data
        if blob.endswith(b"\n\n") or blob.endswith(b"\r\n\r\n"):
            self.rest = b""
            return blob
        cut = max(_end(blob, b"\n\n"), _end(blob, b"\r\n\r\n"))
        self.rest = blob[cut:]
        if len(self.rest) > self._limit_bytes:
            raise FrameTooLong(f"an SSE event of more than {self._limit_bytes} bytes")
        return blob[:cut]


def each_event(blob: bytes) -> Iterator[bytes]:
    """The events of a blob of whole events, one after the other; joined again they are the blob."""
    start = 0
    for end in _EVENT_END.finditer(blob):
        yield blob[start : end.end()]
        start = end.end()
    if start < len(blob):
        yield blob[start:]


def event_at(blob: bytes, at: int) -> tuple[int, int]:
    """Where the event that holds byte `at` begins and ends, in a blob of whole events."""
    first = max(_end(blob, b"\n\n", at), _end(blob, b"\r\n\r\n", at))
    ends = [end for mark in (b"\n\n", b"\r\n\r\n") if (end := _find_end(blob, mark, first))]
    return first, min(ends, default=len(blob))


def event_data(event: bytes) -> bytes | None:
    """The `data:` payload of one event, or None when it has none (a comment)."""
    parts = list(_data_lines(event))
    return b"\n".join(parts) if parts else None


def _data_lines(event: bytes) -> Iterator[bytes]:
    for line in event.splitlines():
        if line.startswith(b"data:"):
            value = line[5:]
            yield value[1:] if value.startswith(b" ") else value


def _end(blob: bytes, mark: bytes, before: int | None = None) -> int:
    at = blob.rfind(mark, 0, before)
    return at + len(mark) if at >= 0 else 0


def _find_end(blob: bytes, mark: bytes, start: int) -> int:
    at = blob.find(mark, start)
    return at + len(mark) if at >= 0 else 0
