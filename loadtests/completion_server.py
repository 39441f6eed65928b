"""The HTTP of a small OpenAI server that streams: one connection, on the bare transport.

    POST …    a completion: `asked` has its body, and replies when its time comes
    GET …     a list of one model

Its peer, a gateway, says how long a body is, and sends the next request after the last reply. On
the bare transport: hundreds of streams shall cost the machine little beside what is measured.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any, Final, cast

import orjson

_JSON: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
SSE: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
"""The head of a reply; chunks of events follow it."""

END: Final = b"0\r\n\r\n"
DONE: Final = b"data: [DONE]\n\n"


class Completions(asyncio.Protocol, ABC):
    """`timer`: the next step of the reply that is under way, cancelled when the peer hangs up."""

    def __init__(self, model: str) -> None:
        listing = orjson.dumps({"object": "list", "data": [{"id": model, "object": "model"}]})
        self._listing = _JSON % (len(listing), listing)
        self._buffer = b""
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport

    @abstractmethod
    def asked(self, body: dict[str, Any]) -> None: ...

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._buffer = rest
            self.transport.write(self._listing)
            return
        lower = head.lower()
        length = int(lower[lower.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
        if len(rest) >= length:
            self._buffer = rest[length:]
            self.asked(orjson.loads(rest[:length]))


def event(value: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def chunk(blob: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(blob), blob)
