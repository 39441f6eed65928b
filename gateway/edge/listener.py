"""A port that speaks HTTP: aiohttp's server half, with limits, and errors in OpenAI's shape.

aiohttp's parser (llhttp, strict) refuses what could be read in two ways: lengths that differ or
are given twice, a length beside a transfer coding, folded headers, chunk sizes that are none, two
hosts. It answers before any handler runs, in plain text, which a client library shows as noise; so
the protocol is ours in a few methods. After any such refusal the connection closes: what follows
on it cannot be told from what was refused.

Limits of a connection, so that a slow or silent peer costs little and not for long: the size of a
head, the time to finish one once begun, and how long a connection may idle between requests. A
request that comes in one read costs no timer. The body's own limits are in `body`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from http import HTTPStatus
from secrets import token_hex
from typing import Any, Final

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong

from gateway.config import ListenConfig
from gateway.edge.framework import REPLY, respond
from gateway.edge.front import Front, Serve, Short
from gateway.errors import (
    BadRequest,
    ExpectationFailed,
    GatewayError,
    HeadTooLarge,
    HeadTooSlow,
    Internal,
    NoSuchRoute,
    UnknownEncoding,
)
from shared.wire import REQUEST_ID

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_CLOSE_S: Final = 2.0  # for connections whose handlers have been ended already
_LINGER_S: Final = 5.0  # to read the rest of a body that was refused, so that the reply is seen


class Listener:
    def __init__(
        self,
        app: web.Application,
        *,
        host: str,
        port: int,
        limits: ListenConfig | None = None,
        shared: bool = False,
        serve: Serve | None = None,
        short: Short | None = None,
        stall_s: float = 60.0,
    ) -> None:
        """`shared`: other processes listen on the same port, and the kernel spreads connections.
        `serve`, `short`: who answers completions that need no framework (edge/front.py)."""
        # A client that leaves cancels its handler: that is how everything behind learns of it.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_CLOSE_S
        )
        self._host = host
        self._port = port
        self._limits = limits or ListenConfig()
        self._shared = shared
        self._serve, self._short = serve, short
        self._stall_s = stall_s
        self._fronts: set[Front] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Raises OSError when the port cannot be had."""
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None
        loop, limits = asyncio.get_running_loop(), self._limits
        serve, short = self._serve, self._short

        def framework() -> asyncio.Protocol:
            return _Protocol(manager, loop, limits)

        def front() -> asyncio.Protocol:
            assert serve is not None
            assert short is not None
            return Front(
                serve,
                short,
                framework,
                limits=limits,
                stall_s=self._stall_s,
                open_ones=self._fronts,
            )

        self._server = await loop.create_server(
            framework if serve is None else front,
            self._host,
            self._port,
            backlog=_BACKLOG,
            reuse_port=self._shared or None,
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for front in list(self._fronts):
            front.transport.close()
        await self._runner.cleanup()


def reserved(host: str, port: int) -> socket.socket:
    """A port held for listeners that share it: bound and never listening, so it gets no connection.

    Raises OSError when someone listens there already, which sharing would hide.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if port:
        with socket.create_server((host, port), family=family):
            pass
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, port))
    return held


class _Protocol(web.RequestHandler):
    __slots__ = ("_began_at", "_body", "_head_bytes", "_limits", "_timer")

    def __init__(self, manager: Any, loop: asyncio.AbstractEventLoop, limits: ListenConfig) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.keepalive_s,
            lingering_time=_LINGER_S,
            max_line_size=limits.header_max_bytes,
            max_field_size=limits.header_max_bytes,
        )
        self._limits = limits
        self._body: StreamReader | None = None  # of the last request whose head was read
        self._head_bytes = 0  # of a head that is not whole yet
        self._began_at = 0.0  # loop time at which it began; 0: none has
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        before, body = self._request_count, self._body
        in_body = body is not None and not body.is_eof()
        super().data_received(data)
        if self._request_count != before:
            message, self._body = self._messages[-1]
            size = self._head_bytes + len(data)
            self._head_bytes = 0
            self._began_at = 0.0
            if size > self._limits.header_max_bytes:  # with its body, perhaps: count the head
                self._weigh(getattr(message, "raw_headers", ()))
        elif not in_body and data.strip(b"\r\n"):  # some end a body with an empty line of their own
            self._head_grows(len(data))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """True: the connection stays, for the completion that is under way."""
        request, body = self._current_request, self._body
        reply = request.get(REPLY) if request is not None else None
        whole = body is None or body.is_eof()
        return reply is not None and whole and reply.half_closed()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        error: GatewayError
        if isinstance(exc, LineTooLong):
            error = self._too_large()
        elif isinstance(exc, ContentEncodingError):  # one whose library is not here
            error = UnknownEncoding("This Content-Encoding is not known; use gzip or none.")
        elif status < 500:
            lines = (message or "").splitlines() or ["it could not be parsed"]
            error = BadRequest(f"This is not a valid HTTP request: {lines[0].rstrip(':.')}.")
            _log.info("not HTTP", extra={"why": lines[0]})
        else:
            error = Internal()
            _log.error("handler failed", exc_info=exc)
        reply = respond(error, {REQUEST_ID: f"req_{token_hex(16)}"})
        reply.force_close()
        return reply

    def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> Coroutine[Any, Any, tuple[web.StreamResponse, bool]]:
        """What aiohttp refuses by itself (CONNECT, an unknown `Expect`) is plain text there."""
        if isinstance(resp, web.HTTPException):
            error: GatewayError = NoSuchRoute(f"There is no {request.method} of that address.")
            if isinstance(resp, web.HTTPExpectationFailed):
                error = ExpectationFailed("The only expectation this server meets is 100-continue.")
            resp = respond(error, {REQUEST_ID: f"req_{token_hex(16)}"})
            resp.force_close()
        return super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that is broken was answered with a 400; it is no fault of ours to log."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    # Heads that come in pieces ------------------------------------------------------------------

    def _head_grows(self, more: int) -> None:
        """A read with part of a head, and nothing else that matters.

        A part that came in one read with the end of the request before is not seen, but by
        the idle limit.
        """
        if not self._began_at:
            self._began_at = self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(self._limits.header_timeout_s, self._late)
        self._head_bytes += more
        if self._head_bytes > self._limits.header_max_bytes:
            self._refuse(self._too_large())

    def _weigh(self, headers: Any) -> None:
        if sum(len(name) + len(value) for name, value in headers) > self._limits.header_max_bytes:
            self._messages.pop()
            self._refuse(self._too_large())

    def _late(self) -> None:
        """Armed by the first head that came in pieces; re-armed only if another one has begun."""
        self._timer = None
        if not self._began_at or self.transport is None:
            return
        limit_s = self._limits.header_timeout_s
        left_s = self._began_at + limit_s - self._loop.time()
        if self._current_request is not None or self._messages:
            left_s = limit_s  # an answer is under way: the part head behind it can wait
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._late)
        else:
            self._refuse(HeadTooSlow(f"The request's head was not complete in {limit_s:g} s."))

    def _too_large(self) -> HeadTooLarge:
        most = self._limits.header_max_bytes
        return HeadTooLarge(f"The request line or headers are larger than {most} bytes.")

    def _refuse(self, error: GatewayError) -> None:
        """Close; with an answer, unless an earlier request's answer is still to come."""
        if self.transport is not None and self._current_request is None and not self._messages:
            body = error.body()
            self.transport.write(
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                f"{REQUEST_ID}: req_{token_hex(16)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
        self.force_close()
