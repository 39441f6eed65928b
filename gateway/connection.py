"""One HTTP/1.1 connection to a replica, and the at most one exchange that runs on it.

What is needed of a client is small: write one request, hand each read of the reply to a `Sink`
inside the transport's own callback, and wake one coroutine once, at the end.

Law of an exchange: the sink sees `head` once, then `body` zero or more times; then `run` returns
(the reply is whole, or the sink has all it needs) or raises exactly one `UpstreamError`.
Cancelling `run` closes the connection, so the replica learns of it at once.

The raw lane: a read that is exactly one HTTP chunk, which is how engines write a token, is offered
to the sink as it is. When the sink takes it, nothing is parsed: the parser stands between two
chunks, so to it such a chunk may as well not have come. Any other read is parsed.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

import httptools

Headers = list[tuple[bytes, bytes]]

_SIZE_CHARS_MAX: Final = 10
LOOK_S: Final = 0.02  # silence that has lasted too long is looked at once more after this
LINGER_S: Final = 1.0  # a reply whose sink has enough may take this long to end, then is cut


class UpstreamError(Exception):
    """An exchange that gave no whole reply. `answered` says whether any byte of one came."""

    answered = False


class ConnectFailed(UpstreamError):
    """No connection: refused, unreachable or too slow to open. The replica saw nothing."""


class ReplyLost(UpstreamError):
    """The connection ended, or what came was not HTTP, before the reply was whole."""


class ReplyTimeout(UpstreamError):
    """The replica kept the connection and said nothing for too long."""


class ReplyUnfit(UpstreamError):
    """Raised by a sink: HTTP, but not a reply that can be used."""


class ReplyTooLong(UpstreamError):
    """Raised by a sink: more than it will keep."""


class Flow(Protocol):
    """What a sink may ask of its connection."""

    def pause(self) -> None:
        """Read no more until `resume`: the sink's own client is slow."""

    def resume(self) -> None: ...

    def limit_silence(self, idle_s: float) -> None:
        """From now on this much silence ends the exchange (a report stream names its own)."""


class Sink(Protocol):
    """Who receives a reply; called from the transport's callback, so it must not block."""

    def head(self, status: int, headers: Headers, flow: Flow) -> None: ...

    def body(self, data: bytes) -> bool:
        """True: nothing that follows is wanted, the exchange may return."""
        ...

    def chunk(self, data: bytes, start: int) -> bool:
        """A read that is a size, then from `start` on as many bytes, then two that end the chunk
        if they are a line's end. False: give it as `body` instead.
        """
        return False


class Pool(Protocol):
    """Who keeps connections between exchanges."""

    def idle(self, connection: Connection) -> None: ...
    def ended(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self.closed = False
        self.used = False  # it has carried a reply before: it may have gone stale since
        self.last_at = 0.0  # loop time of the last read, or of becoming idle
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0  # loop time at which the timer fires
        self._doubted_at = -1.0  # the last read when silence was found too long

    # One exchange -------------------------------------------------------------------------------

    async def run(self, request: bytes, sink: Sink, first_byte_s: float, idle_s: float) -> None:
        self._headers: Headers = []
        self._head_due = self._whole = self._answered = self._until_close = self._paused = False
        self._reusable = self._between = False
        self._idle_s = idle_s
        self._sink, self._done = sink, self._loop.create_future()
        self.last_at = self._loop.time()
        self._limit(first_byte_s)
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.abort()
            raise

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self.last_at = self._loop.time()
            self._transport.resume_reading()

    def limit_silence(self, idle_s: float) -> None:
        self._limit(idle_s)

    def silent_s(self) -> float:
        return self._loop.time() - self.last_at

    def fail(self, error: UpstreamError) -> None:
        """End the running exchange with `error`; the connection is not used again."""
        done, self._done, self._sink = self._done, None, None
        if done is not None and not done.done():
            error.answered = self._answered
            done.set_exception(error)
        self.abort()

    def abort(self) -> None:
        self._sink = None
        self._stop_timer()
        if not self.closed:
            self.closed = True
            self._transport.abort()
        self._pool.ended(self)

    # asyncio.Protocol ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is one in all but its bases
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # idle: a replica has nothing to say unasked
            return self.abort()
        self.last_at = self._loop.time()
        if self._between and self._sink is not None:
            # Exactly one chunk, its size written plainly? The last chunk, of size 0, is none.
            at = data.find(b"\r\n", 1, _SIZE_CHARS_MAX)
            size = len(data) - at - 4
            if at > 0 and size > 0 and data[:at] == b"%x" % size and self._sink.chunk(data, at + 2):
                return
        elif not self._answered:
            self._answered = True
            self._limit(self._idle_s)
        try:
            self._between = False
            self._parser.feed_data(data)
            # With part of the next size read, the last byte would not be a line's end.
            self._between = self._between and data.endswith(b"\n")
            self._deliver()
        except UpstreamError as error:
            self.fail(error)
        except (httptools.HttpParserError, ValueError) as error:
            self.fail(ReplyLost(f"the reply is not what it should be: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._done is not None:
            if self._until_close and exc is None:
                self._finish(reusable=False)
            else:
                self.fail(ReplyLost(f"the connection closed: {exc or 'end of stream'}"))
        self.abort()

    # httptools ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._whole:  # more than was asked for: nothing on this connection can be trusted
            raise ReplyLost("a second reply came with the first")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._status < 200:  # 100 Continue, 103 Early Hints
            self._headers = []
            return
        self._head_due = True
        names = {name for name, _ in self._headers}
        self._until_close = names.isdisjoint((b"content-length", b"transfer-encoding"))

    def on_body(self, data: bytes) -> None:
        self._between = False
        self._parts.append(data)

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._whole = True
            self._reusable = self._parser.should_keep_alive()  # the parser knows it only now

    # Delivery -----------------------------------------------------------------------------------

    def _deliver(self) -> None:
        sink = self._sink
        if self._head_due:
            self._head_due = False
            if sink is not None:
                sink.head(self._status, self._headers, self)
        enough = False
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            enough = sink is not None and sink.body(data)
        if self._whole:
            self._finish(reusable=self._reusable)
        elif enough:
            self._linger()

    def _linger(self) -> None:
        """Answer the waiter now; the reply's last bytes, due any moment, free the connection."""
        assert self._done is not None
        self._sink = None
        self.resume()
        self._limit(LINGER_S)
        if not self._done.done():
            self._done.set_result(None)

    def _finish(self, *, reusable: bool) -> None:
        done, self._done, self._sink = self._done, None, None
        if done is not None and not done.done():
            done.set_result(None)
        if reusable and not self.closed:
            self.resume()
            self.used = True
            self.last_at = self._loop.time()
            self._pool.idle(self)
        else:
            self.abort()

    # Silence ------------------------------------------------------------------------------------

    def _limit(self, limit_s: float) -> None:
        """So much silence is allowed from now on.

        The timer is armed rarely: a read moves `last_at` and never the timer, and one that is
        armed for an exchange stays for the next; early, it looks and is armed anew.
        """
        self._limit_s = limit_s
        due_at = self._loop.time() + limit_s
        if self._timer is None or due_at < self._due_at:
            self._stop_timer()
            self._due_at = due_at
            self._timer = self._loop.call_later(limit_s, self._watch)

    def _watch(self) -> None:
        """A limit that has passed is looked at once more: while this loop was held up nobody read,
        and what the replica said meanwhile comes in right after this timer."""
        self._timer = None
        if self._done is None:  # idle
            return
        left_s = self.last_at + self._limit_s - self._loop.time()
        if self._paused:  # the silence is ours; the sink bounds how long
            left_s = self._limit_s
        if left_s <= 0.001 and self._doubted_at != self.last_at:
            self._doubted_at = self.last_at
            left_s = max(LOOK_S, min(-left_s, self._limit_s))  # as long as we were away, at most
        if left_s > 0.001:
            self._due_at = self._loop.time() + left_s
            self._timer = self._loop.call_later(left_s, self._watch)
        else:
            self.fail(ReplyTimeout(f"no byte for {self._limit_s:g} s"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
