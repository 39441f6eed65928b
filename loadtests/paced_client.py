"""One paced stream after another on connections of their own, and what came of them.

A protocol on the bare transport, so that hundreds of them cost little beside what they measure.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from typing import Final, cast

import orjson

from loadtests.paced_server import MODEL
from shared.clock import monotonic

_EVENT: Final = re.compile(rb'"left":(\d+),"sent":([0-9.]+)')


@dataclass
class Seen:
    """What all clients saw."""

    finished: int = 0
    cut: int = 0
    refused: int = 0
    events: int = 0
    lost_events: int = 0
    late_ms: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One stream on a connection of its own."""

    def __init__(self, request: bytes, seen: Seen, done: asyncio.Future[None]) -> None:
        self._request, self._seen, self._done = request, seen, done
        self._tail = b""
        self._left = -1  # events that are to come, as the last one said; -1: none came
        self._ended = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now, seen = monotonic(), self._seen
        data = self._tail + data
        cut = data.rfind(b"\n\n") + 2
        self._tail = data[cut:] if cut > 1 else data
        for left, sent in _EVENT.findall(data[:cut] if cut > 1 else b""):
            if self._left >= 0:
                seen.lost_events += self._left - 1 - int(left)
            self._left = int(left)
            seen.events += 1
            seen.late_ms.append((now - float(sent)) * 1000)
        if b"data: [DONE]" in data:
            self._ended = self._left == 0
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended:
            self._seen.finished += 1
        elif self._left < 0:
            self._seen.refused += 1
        else:
            self._seen.cut += 1
        if not self._done.done():
            self._done.set_result(None)


async def stream(url: str, key: str, seconds: float, seen: Seen) -> None:
    """Ask for a reply that takes so long, and read it to its end, whatever that is."""
    body = orjson.dumps(
        {
            "model": MODEL,
            "stream": True,
            "seconds": round(seconds, 1),
            "max_tokens": 16,
            "messages": [{"role": "user", "content": "Tell me a long story."}],
        }
    )
    host, port = url.removeprefix("http://").split(":")
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: %b\r\nauthorization: Bearer %b\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (host.encode(), key.encode(), len(body), body)
    )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    try:
        await loop.create_connection(lambda: Client(request, seen, done), host, int(port))
    except OSError:
        seen.refused += 1
        return
    await done
