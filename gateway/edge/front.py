"""The tenants' port, short way in: a plain POST of a completion, read without a framework.

Why it exists: aiohttp's server half costs about 60 µs a request, as much as all our features, for
generality that a completion does not need. So the connection is ours as long as what comes on it
is plain, and aiohttp's from the first bytes that are not: its protocol gets those unread, answers,
refuses and limits them as it does everywhere, and keeps the connection.

Plain is what can be read in one way only: exactly one of the two request lines; a head of
well-formed lines that came in one read, no name given twice, nothing about the connection or the
body but one decimal `Content-Length`; and a body of that length that is soon whole. So this reader
refuses nothing and forgives nothing. It has no second opinion on what a request is, and what would
take judgement (transfer codings, `Expect`, compression, long or slow or folded or forged) is
aiohttp's, which is strict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Protocol, cast

from gateway.config import ListenConfig
from gateway.edge.plain import Head, Plain, plain_head
from gateway.edge.reply import Reply
from shared.trace_context import TraceHeaders

_BODY_BYTES_MAX: Final = 1 << 20  # a longer body is gathered by aiohttp, which holds the peer back
_GATHER_S: Final = 0.5  # for the rest of a body, then aiohttp waits for it
_AHEAD_BYTES_MAX: Final = 64 << 10  # of further requests, before the reply is whole


class Call(Protocol):
    """A completion as it was asked for over HTTP."""

    @property
    def path(self) -> str: ...

    @property
    def passed(self) -> bytes:
        """The header lines that go on to the replica."""

    @property
    def trace(self) -> TraceHeaders:
        """Its trace context, which goes on too."""

    @property
    def header(self) -> Callable[[str], str | None]:
        """One header, by its name in lower case."""

    async def read(self) -> bytes:
        """The body; raises GatewayError when it cannot be had."""
        ...


class Begun(Protocol):
    def cancel(self) -> Any: ...


Serve = Callable[[Call, Reply], Coroutine[Any, Any, None]]


Short = Callable[[Plain, Reply, Callable[[], None], Callable[[], Begun]], Begun | None]
"""Begins a completion that can do without a task, and calls back when the reply is out, or to
begin it otherwise; None: it cannot (completion/short_way.py)."""


class Front(asyncio.Protocol):
    """One connection, while what comes on it is plain. It is a `Client` of its replies."""

    def __init__(
        self,
        serve: Serve,
        short: Short,
        otherwise: Callable[[], asyncio.Protocol],
        *,
        limits: ListenConfig,
        stall_s: float,
        open_ones: set[Front],
    ) -> None:
        self._serve = serve
        self._short = short
        self._otherwise = otherwise
        self._limits = limits
        self._stall_s = stall_s
        self._open_ones = open_ones
        self._loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.writing_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._begun: Begun | None = None
        self._reply: Reply | None = None  # that is under way
        self._buffer = bytearray()  # what has come and is not answered yet
        self._head: Head | None = None  # of a request whose body is not whole
        self._body = slice(0, 0)  # where its body is in the buffer, once it has come
        self._idle_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._gathering: asyncio.TimerHandle | None = None  # while a body is not whole

    # asyncio.Protocol ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one in all but its bases
        self.transport = cast(asyncio.Transport, transport)
        self._open_ones.add(self)
        self._timer = self._loop.call_later(self._limits.keepalive_s, self._look)

    def data_received(self, data: bytes) -> None:
        if self._begun is None and not self._buffer:
            return self._take(data)
        self._buffer += data
        if self._begun is None:
            self._take_buffer()
        elif len(self._buffer) > _AHEAD_BYTES_MAX:
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """True: the connection stays, for the answer that is under way."""
        return self._reply is not None and self._reply.half_closed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._drained is not None and not self._drained.done():
            self._drained.set_exception(ConnectionResetError("the client has left"))
        if self._begun is not None:  # that is how everything behind learns of it
            self._begun.cancel()

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # Client -------------------------------------------------------------------------------------

    async def drain(self) -> None:
        if self.transport.is_closing():
            raise ConnectionResetError("the client has left")
        if self.writing_paused:
            self._drained = self._loop.create_future()
            await self._drained

    # Requests -----------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        """The beginning of a request, perhaps all of it."""
        end = data.find(b"\r\n\r\n")
        found = plain_head(data[: end + 2]) if 0 < end < self._limits.header_max_bytes else None
        if found is None or found[1] > min(_BODY_BYTES_MAX, self._limits.body_max_bytes):
            return self._hand_over(data)
        head, length = found
        at = end + 4
        if len(data) == at + length:
            return self._begin(head, data[at:])
        self._buffer[:] = data
        self._head, self._body = head, slice(at, at + length)
        self._take_buffer()
        if self._head is not None:
            self._gathering = self._loop.call_later(_GATHER_S, self._hand_over)

    def _take_buffer(self) -> None:
        head, its = self._head, self._body
        if head is None:
            data = bytes(self._buffer)
            self._buffer.clear()
            self._take(data)
        elif len(self._buffer) >= its.stop:
            body = bytes(self._buffer[its])
            del self._buffer[: its.stop]
            self._head = None
            if self._gathering is not None:  # it could not tell the next request from its own
                self._gathering.cancel()
            self._begin(head, body)

    def _begin(self, head: Head, body: bytes) -> None:
        reply = self._reply = Reply(self, chunked=True, keep_alive=True, stall_s=self._stall_s)
        call = Plain(head, body)
        otherwise = partial(self._serve_slowly, call, reply)
        self._begun = self._short(call, reply, self._over, otherwise) or otherwise()

    def _serve_slowly(self, call: Plain, reply: Reply) -> asyncio.Task[None]:
        # Not `spawn`: the reference is here, and `serve` tells of every crash itself.
        self._begun = task = self._loop.create_task(self._serve(call, reply))
        task.add_done_callback(self._served)
        return task

    def _served(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # only that the client has left, which we know
        self._over()

    def _over(self) -> None:
        """The reply is out."""
        reply, self._begun, self._reply = self._reply, None, None
        self._idle_since = self._loop.time()
        if reply is not None and not reply.reusable:
            self.transport.close()
        elif self._buffer and not self.transport.is_closing():
            self.transport.resume_reading()
            self._take_buffer()

    def _hand_over(self, data: bytes | None = None) -> None:
        data = bytes(self._buffer) if data is None else data
        self._forget()
        self._head = None  # a timer of an earlier request may still look for it
        other = self._otherwise()
        self.transport.set_protocol(other)
        other.connection_made(self.transport)
        other.data_received(data)

    # Time ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Close a connection on which nothing has come for long; armed once, re-armed lazily."""
        left_s = self._idle_since + self._limits.keepalive_s - self._loop.time()
        if self._begun is not None or self._head is not None:
            left_s = self._limits.keepalive_s
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self.transport.close()

    def _forget(self) -> None:
        self._open_ones.discard(self)
        for timer in (self._timer, self._gathering):
            if timer is not None:
                timer.cancel()
