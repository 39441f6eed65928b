"""One reply to a client, written by hand on its transport.

No framework sees it (edge/framework.py), because its write costs more a chunk than all the rest
(edge/relay.py). So the head, the chunk framing and the end are made here: one `transport.write`
a call.

The last bytes of a reply that is `held` wait for `let_go`: the bill is on disk by then.

Law: at most one head, and nothing after the end; a comment or an error of ours stands between
whole events, never inside one; what waits for a slow reader is bounded by its transport's
high-water mark and one read, because the replica is held back and, past `stall_s`, the client cut.
"""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from functools import cache
from http import HTTPStatus
from typing import Final, Protocol

from gateway.edge.exchange import Flow, Headers
from gateway.errors import GatewayError
from shared import tasks
from shared.clock import wall

_JSON: Final[Headers] = [(b"content-type", b"application/json")]
_COMMENT: Final = b": keep-alive\n\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_OURS: Final = frozenset(  # about the hop and not the reply, or written by us
    b"connection keep-alive proxy-authenticate te trailer transfer-encoding upgrade server date "
    b"content-length cache-control x-accel-buffering x-request-id retry-after".split()
)
_OUR_PREFIXES: Final = (b"x-loraplex-", b"x-ratelimit-")
_PROBE_S: Final = 0.1  # at first: a reset is a round trip away
_TICK_S: Final = 0.001


class Client(Protocol):
    """The connection that a reply goes out on."""

    transport: asyncio.Transport

    @property
    def writing_paused(self) -> bool:
        """What was written is more than it should be, because the client does not read."""

    async def drain(self) -> None:
        """Until it is read; raises ConnectionError when the client has left."""


class Reply:
    """Where one request is answered, at most once.

    `headers` are on every reply of this request; what is added after the head went out is lost.
    """

    def __init__(self, client: Client, *, chunked: bool, keep_alive: bool, stall_s: float) -> None:
        """`chunked`: the client reads HTTP/1.1. `keep_alive`: it wants its connection kept."""
        self._client = client
        self._transport = client.transport
        self._loop = asyncio.get_running_loop()
        self._chunked = chunked
        self._stall_s = stall_s
        self._flow: Flow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._every_s = 0.0
        self._wrote_at = 0.0
        self.keep_alive = keep_alive and chunked
        self.headers: dict[str, str] = {}
        self.lines = ""  # more headers, each with its line end: what is left of the quota,
        self.place = ""  # and where it was placed
        self.begun = False
        self.ended = False
        self.held = False
        """Its last bytes wait until `let_go`."""
        self._last = b""
        self._probing = False

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """A reply that is complete: one write, `Content-Length` kept."""
        length = b"content-length: %d\r\n" % len(body)
        self._finish(self._head(status, headers, length) + body)

    def events(self, blob: bytes, headers: Headers, flow: Flow | None, *, last: bool) -> None:
        """Whole SSE events, as one chunk; with `last`, the end of the reply too."""
        head = b"" if self.begun else self._stream_head(headers)
        if self._chunked:
            blob = b"%b%x\r\n%b\r\n%b" % (head, len(blob), blob, _LAST_CHUNK if last else b"")
        else:
            blob = head + blob
        if last:
            return self._finish(blob)
        self._write(blob)
        if flow is not None and self._client.writing_paused:
            self._hold_back(flow)

    def chunk(self, data: bytes, flow: Flow | None) -> bool:
        """A chunk of whole events as the replica framed it; False: give its `events` instead."""
        if not self._chunked or not self.begun:
            return False
        self._wrote_at = self._loop.time()
        if not self._transport.is_closing():
            self._transport.write(data)
        if flow is not None and self._client.writing_paused:
            self._hold_back(flow)
        return True

    def end(self, event: bytes = b"") -> None:
        """End a stream, with a last event of ours when it failed."""
        if event:
            return self.events(event, [], None, last=True)
        head = b"" if self.begun else self._stream_head([])
        self._finish(head + (_LAST_CHUNK if self._chunked else b""))

    def refuse(self, error: GatewayError) -> None:
        """Tell it: as the whole reply, or inside the stream that has begun."""
        if not self.begun:
            self.headers.update(error.headers())
            self.whole(error.status, _JSON, error.body())
        elif not self.ended:
            self.end(error.event())

    def let_go(self) -> None:
        """The last bytes may go out, now or when they come."""
        self.held = False
        if self._last:
            self._write(self._last)
            self._last = b""

    def keep_awake(self, every_s: float) -> None:
        """From now on a comment goes out whenever the stream was silent for so long.

        The first one brings the head: call this only once the status is sure to be 200.
        """
        self._every_s = every_s
        self._wrote_at = self._loop.time()
        self._timer = self._loop.call_later(every_s, self._tick)

    def wait_visibly(self, first_s: float) -> None:
        """It is clear now that a stream has to wait: the first comment goes out soon."""
        if self._timer is not None and not self.begun and first_s < self._every_s:
            self._timer.cancel()
            self._timer = self._loop.call_later(first_s, self._tick_now)

    def close(self) -> None:
        """Nothing more will be written, but for what is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._flow = None

    @property
    def reusable(self) -> bool:
        """Another request may follow on the connection."""
        return self.keep_alive and self.ended

    def peer(self) -> str:
        """The address that the connection comes from."""
        name = self._transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else ""

    def half_closed(self) -> bool:
        """The client sends no more; False: take it for gone. Whether it is, only a write tells,
        which is answered by a reset then: so what means nothing is written now and each second."""
        if self.ended or not (self.begun or self._chunked):
            return self.ended
        self.keep_alive = False
        if not self._probing:
            self._probing = True
            self._probe(_PROBE_S)
        return True

    def _probe(self, pause_s: float) -> None:
        if self.ended or self._transport.is_closing():
            return
        if self.begun:
            self.events(_COMMENT, [], None, last=False)
        else:  # every client skips it, asked for or not
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._loop.call_later(pause_s, self._probe, min(2 * pause_s, 1.0))

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
        theirs = b"".join(
            [
                b"%b: %b\r\n" % header
                for header in headers
                if header[0] not in _OURS and not header[0].startswith(_OUR_PREFIXES)
            ]
        )
        ours = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        if not self.keep_alive:
            ours += "connection: close\r\n"
        first = _status_line(status) + _date()
        return b"".join((first, theirs, (ours + self.lines + self.place).encode(), own, b"\r\n"))

    def _write(self, data: bytes) -> None:
        self._wrote_at = self._loop.time()
        if not self._transport.is_closing():
            self._transport.write(data)

    def _finish(self, last: bytes) -> None:
        self.ended = True
        if self.held:
            self._last = last
        else:
            self._write(last)

    def _tick_now(self) -> None:
        if not self.begun:
            self._wrote_at = -self._every_s
        self._tick()

    def _tick(self) -> None:
        left_s = self._wrote_at + self._every_s - self._loop.time()
        if left_s <= _TICK_S:
            left_s = self._every_s
            if not self.ended and not self._client.writing_paused:
                self.events(_COMMENT, [], None, last=False)
        self._timer = self._loop.call_later(left_s, self._tick)

    def _hold_back(self, flow: Flow) -> None:
        if self._flow is None:
            self._flow = flow
            flow.pause()
            tasks.spawn(self._hold(), name="slow reader")

    async def _hold(self) -> None:
        """The replica is paused until the client has read; one that never does is cut off."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._client.drain()
        except TimeoutError:
            self._transport.abort()
        except ConnectionError:
            pass
        flow, self._flow = self._flow, None
        if flow is not None:
            flow.resume()


@cache
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Status"
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


_dated: tuple[int, bytes] = (0, b"")


def _date() -> bytes:
    global _dated
    second = int(wall())
    if _dated[0] != second:
        _dated = (second, b"date: %b\r\n" % formatdate(second, usegmt=True).encode())
    return _dated[1]
