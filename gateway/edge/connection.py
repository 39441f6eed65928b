"""One HTTP/1.1 connection to a replica, and the at most one exchange that runs on it.

What is needed of a client is small: write one request, hand each read of the reply to a `Sink`
inside the transport's own callback, and call back once, at the end.

Law of an exchange: the sink sees `head` once, then `body` zero or more times; then `ended` is
called once, with None (the reply is whole, or the sink has all it needs) or one `UpstreamError`.
By then the connection is free, or closed. `drop` closes it without that call, so the replica
learns of it at once.

The raw lane: between two chunks a read is offered to the sink as it is, because a chunk a token is
how engines stream. When the sink takes it, nothing is parsed: to the parser, which stands between
two chunks, such a chunk may as well not have come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol, cast

import httptools

from gateway.edge.exchange import Ended, Headers, ReplyLost, ReplyTimeout, Sink, UpstreamError

LOOK_S: Final = 0.02  # silence that has lasted too long is looked at once more after this
LINGER_S: Final = 1.0  # a reply whose sink has enough may take this long to end, then is cut


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
        self._lane: Callable[[bytes], bool] | None = None  # the sink's, between two chunks
        self._sink: Sink | None = None
        self._ended: Ended | None = None
        self._busy = False
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0  # loop time at which the timer fires
        self._doubted_at = -1.0  # the last read when silence was found too long

    # One exchange -------------------------------------------------------------------------------

    def start(
        self, request: bytes, sink: Sink, first_byte_s: float, idle_s: float, ended: Ended
    ) -> None:
        self._headers: Headers = []
        self._busy = True
        self._head_due = self._whole = self._answered = self._until_close = False
        self._reusable = self._between = False
        self._idle_s = idle_s
        self._sink, self._ended = sink, ended
        self.last_at = self._loop.time()
        self._limit(first_byte_s)
        self._transport.write(request)

    async def run(self, request: bytes, sink: Sink, first_byte_s: float, idle_s: float) -> None:
        """`start` and wait; raises the error. Cancelled, it drops the connection."""
        done: asyncio.Future[None] = self._loop.create_future()
        self.start(request, sink, first_byte_s, idle_s, partial(_resolve, done))
        try:
            await done
        except asyncio.CancelledError:
            self.drop()
            raise

    def drop(self) -> None:
        """Nobody wants the reply any more."""
        self._ended = None
        self.abort()

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
        ended, self._ended = self._ended, None
        if self._busy:
            error.answered = self._answered
            error.stale = self.used and not self._answered and isinstance(error, ReplyLost)
        self.abort()
        if ended is not None:
            ended(error)

    def abort(self) -> None:
        self._sink = self._lane = None
        self._busy = False
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
        self.last_at = self._loop.time()
        if self._lane is not None and self._lane(data):
            return
        if not self._busy:  # idle: a replica has nothing to say unasked
            return self.abort()
        if not self._answered:
            self._answered = True
            self._limit(self._idle_s)
        try:
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
        if self._busy:
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
        names = dict(self._headers)
        self._until_close = b"content-length" not in names and b"transfer-encoding" not in names

    def on_chunk_header(self) -> None:
        self._between = False

    def on_body(self, data: bytes) -> None:
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
        else:
            lane = sink is not None and self._between and sink.takes_chunks
            self._lane = sink.chunk if lane and sink is not None else None

    def _linger(self) -> None:
        """The exchange ends now; the reply's last bytes, due any moment, free the connection."""
        ended, self._ended = self._ended, None
        self._sink = self._lane = None
        self.resume()
        self._limit(LINGER_S)
        if ended is not None:
            ended(None)

    def _finish(self, *, reusable: bool) -> None:
        ended, self._ended = self._ended, None
        self._sink = self._lane = None
        self._busy = False
        if reusable and not self.closed:
            self.resume()
            self.used = True
            self.last_at = self._loop.time()
            self._pool.idle(self)
        else:
            self.abort()
        if ended is not None:
            ended(None)

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
        if not self._busy:
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


def _resolve(done: asyncio.Future[None], error: UpstreamError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
