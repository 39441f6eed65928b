"""One reply to a client, written by hand on its transport.

aiohttp parses the request and keeps the connection; the reply it never sees (`Written`), because
its write costs more a chunk than all the rest (gateway/relay.py). So the head, the chunk framing
and the end are made here: one `transport.write` a call.

Law: at most one head, and nothing after the end; a comment or an error of ours stands between
whole events, never inside one; what waits for a slow reader is bounded by its transport's
high-water mark and one read, because the replica is held back and, past `stall_s`, the client cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from gateway.connection import Flow, Headers
from gateway.errors import GatewayError
from shared import tasks
from shared.clock import wall

_COMMENT: Final = b": keep-alive\n\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_OURS: Final = frozenset(  # about the hop and not the reply, or written by us
    b"connection keep-alive proxy-authenticate te trailer transfer-encoding upgrade server date "
    b"content-length cache-control x-accel-buffering x-request-id retry-after".split()
)
_OUR_PREFIXES: Final = (b"x-loraplex-", b"x-ratelimit-")
_TICK_S: Final = 0.001


class Written(web.StreamResponse):
    """Tells aiohttp that the reply is on the wire; it only keeps or closes the connection."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._kept = keep_alive

    @property
    def keep_alive(self) -> bool:
        return self._kept

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class Reply:
    """Where one request is answered, at most once.

    `headers` are on every reply of this request; what is added after the head went out is lost.
    """

    def __init__(self, request: web.Request, *, stall_s: float) -> None:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has left")
        self._transport = transport
        self._protocol = request.protocol
        self._writer = request.writer
        self._loop = asyncio.get_running_loop()
        self._chunked = request.version >= HttpVersion11
        self._stall_s = stall_s
        self._flow: Flow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._every_s = 0.0
        self._wrote_at = 0.0
        self.keep_alive = request.keep_alive and self._chunked
        self.headers: dict[str, str] = {}
        self.begun = False
        self.ended = False

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """A reply that is complete: one write, `Content-Length` kept."""
        length = b"content-length: %d\r\n" % len(body)
        self.ended = True
        self._write(self._head(status, headers, length) + body)

    def events(self, blob: bytes, headers: Headers, flow: Flow | None, *, last: bool) -> None:
        """Whole SSE events, as one chunk; with `last`, the end of the reply too."""
        head = b"" if self.begun else self._stream_head(headers)
        chunk = b"%x\r\n%b\r\n" % (len(blob), blob) if self._chunked else blob
        end = _LAST_CHUNK if last and self._chunked else b""
        self.ended = last
        self._write(b"".join((head, chunk, end)))
        if flow is not None and self._flow is None and self._protocol.writing_paused:
            self._flow = flow
            flow.pause()
            tasks.spawn(self._hold(), name="slow reader")

    def end(self, event: bytes = b"") -> None:
        """End a stream, with a last event of ours when it failed."""
        if event:
            return self.events(event, [], None, last=True)
        head = b"" if self.begun else self._stream_head([])
        self.ended = True
        self._write(head + (_LAST_CHUNK if self._chunked else b""))

    def keep_awake(self, every_s: float) -> None:
        """From now on a comment goes out whenever the stream was silent for so long.

        The first one brings the head: call this only once the status is sure to be 200.
        """
        self._every_s = every_s
        self._wrote_at = self._loop.time()
        self._timer = self._loop.call_later(every_s, self._tick)

    def close(self) -> web.StreamResponse:
        """Nothing more will be written; what aiohttp is to return."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flow = None
        return Written(keep_alive=self.keep_alive and self.ended)

    def release(self) -> None:
        """The exchange that fed us is over: its connection now serves someone else."""
        self._flow = None

    # Bytes --------------------------------------------------------------------------------------

    def _stream_head(self, headers: Headers) -> bytes:
        own = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
        if self._chunked:
            own += b"transfer-encoding: chunked\r\n"
        if not any(name == b"content-type" for name, _ in headers):
            own += b"content-type: text/event-stream; charset=utf-8\r\n"
        return self._head(200, headers, own)

    def _head(self, status: int, headers: Headers, own: bytes) -> bytes:
        self.begun = True
        lines = [b"HTTP/1.1 %d %b" % (status, _phrase(status)), b"date: " + _date()]
        lines += [
            b"%b: %b" % (name, value)
            for name, value in headers
            if name not in _OURS and not name.startswith(_OUR_PREFIXES)
        ]
        lines += [f"{name}: {value}".encode() for name, value in self.headers.items()]
        if not self.keep_alive:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + b"\r\n" + own + b"\r\n"

    def _write(self, data: bytes) -> None:
        self._wrote_at = self._loop.time()
        if not self._transport.is_closing():
            self._transport.write(data)

    def _tick(self) -> None:
        left_s = self._wrote_at + self._every_s - self._loop.time()
        if left_s <= _TICK_S:
            left_s = self._every_s
            if not self.ended and not self._protocol.writing_paused:
                self.events(_COMMENT, [], None, last=False)
        self._timer = self._loop.call_later(left_s, self._tick)

    async def _hold(self) -> None:
        """The replica is paused until the client has read; one that never does is cut off."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._writer.drain()
        except TimeoutError:
            self._transport.abort()
        except ConnectionError:
            pass
        flow, self._flow = self._flow, None
        if flow is not None:
            flow.resume()


def respond(error: GatewayError, headers: Mapping[str, str]) -> web.Response:
    """An error as a whole reply, by way of aiohttp: refusals need no fast path."""
    return web.Response(
        status=error.status,
        body=error.body(),
        headers={**headers, **error.headers()},
        content_type="application/json",
    )


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"


_dated: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    global _dated
    second = int(wall())
    if _dated[0] != second:
        _dated = (second, formatdate(second, usegmt=True).encode())
    return _dated[1]
