"""Where aiohttp and our replies meet: it parses a request, we write the reply on its transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from gateway.config import ListenConfig
from gateway.edge.body import read_body
from gateway.edge.passing import passed_on
from gateway.edge.reply import Reply
from gateway.errors import GatewayError
from shared.trace_context import NO_TRACE, TRACEPARENT, TRACESTATE, TraceHeaders


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


class _Aiohttp:
    """A connection that aiohttp reads."""

    def __init__(self, transport: asyncio.Transport, request: web.Request) -> None:
        self.transport = transport
        self._protocol = request.protocol
        self._writer = request.writer

    @property
    def writing_paused(self) -> bool:
        return self._protocol.writing_paused

    async def drain(self) -> None:
        await self._writer.drain()


def reply_to(request: web.Request, *, stall_s: float) -> Reply:
    """To a request that aiohttp has read."""
    if request.transport is None:
        raise ConnectionResetError("the client has left")
    request[REPLY] = reply = Reply(
        _Aiohttp(request.transport, request),
        chunked=request.version >= HttpVersion11,
        keep_alive=request.keep_alive,
        stall_s=stall_s,
    )
    return reply


class Asked:
    """A `Call` out of a request that aiohttp has read, but for its body."""

    def __init__(self, request: web.Request, limits: ListenConfig) -> None:
        self._request, self._limits = request, limits
        self.path, self.passed = request.path, passed_on(request.raw_headers)
        self.header = header_of(request)
        self.trace = _trace_of(request)

    async def read(self) -> bytes:
        return await read_body(self._request, self._limits)


def header_of(request: web.Request) -> Callable[[str], str | None]:
    return partial(_header, request)


def _header(request: web.Request, name: str) -> str | None:
    values = request.headers.getall(name, ())
    return values[0] if len(values) == 1 else "" if values else None


def _trace_of(request: web.Request) -> TraceHeaders:
    """Two parents are none; several states are one list."""
    headers = request.headers
    if TRACEPARENT not in headers and TRACESTATE not in headers:
        return NO_TRACE
    parents, states = headers.getall(TRACEPARENT, ()), headers.getall(TRACESTATE, ())
    return TraceHeaders(parents[0] if len(parents) == 1 else "", ",".join(states))


REPLY: Final = web.RequestKey("reply", Reply)  # of a request that aiohttp has read


def respond(error: GatewayError, headers: Mapping[str, str]) -> web.Response:
    """An error as a whole reply, by way of aiohttp: refusals need no fast path."""
    return web.Response(
        status=error.status,
        body=error.body(),
        headers={**headers, **error.headers()},
        content_type="application/json",
    )
