"""The pool against a server that is scripted to the byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from scripted import until

from gateway.edge.exchange import (
    ConnectFailed,
    Flow,
    Headers,
    ReplyLost,
    ReplyTimeout,
    ReplyUnfit,
    Sink,
)
from gateway.edge.upstream import Upstream

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

REQUEST = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Kept(Sink):
    """A sink that keeps everything."""

    def __init__(self, enough_after: bytes | None = None) -> None:
        self.status, self.headers, self.data, self.reads = 0, [], b"", 0
        self.flow: Flow | None = None
        self._enough_after = enough_after

    def head(self, status: int, headers: Headers, flow: Flow) -> None:
        self.status, self.headers, self.flow = status, headers, flow

    def body(self, data: bytes) -> bool:
        self.data += data
        self.reads += 1
        return self._enough_after is not None and self._enough_after in self.data


class Server:
    """Accepts, reads one request head at a time, and runs the script for each."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.connections = self.requests = self.closed = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        self._server.close_clients() if hasattr(self._server, "close_clients") else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                await self.script(reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed += 1
            writer.close()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Script], Awaitable[tuple[Server, Upstream]]]]:
    started: list[tuple[Server, Upstream]] = []

    async def start(script: Script) -> tuple[Server, Upstream]:
        server = Server(script)
        await server.start()
        upstream = Upstream(f"http://127.0.0.1:{server.port}", connect_timeout_s=1)
        started.append((server, upstream))
        return server, upstream

    yield start
    for server, upstream in started:
        upstream.close()
        await until(lambda one=server: one.closed == one.connections)
        await server.stop()


async def exchange(upstream: Upstream, sink: Kept, *, first: float = 2, idle: float = 2) -> None:
    await upstream.exchange(REQUEST, sink, first_byte_s=first, idle_s=idle)


async def says_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HELLO)


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)  # until the client goes
    raise ConnectionResetError


async def test_a_reply_reaches_its_sink_whole_and_the_connection_is_used_again(serve) -> None:
    server, upstream = await serve(says_hello)
    for _ in range(3):
        sink = Kept()
        await exchange(upstream, sink)
        assert (sink.status, sink.data) == (200, b"hello")
        assert sink.headers == [(b"content-length", b"5")]
    assert (server.connections, server.requests) == (1, 3)


async def test_concurrent_exchanges_never_share_a_connection(serve) -> None:
    async def slowly(reader, writer) -> None:
        await asyncio.sleep(0.02)
        writer.write(HELLO)

    server, upstream = await serve(slowly)
    sinks = [Kept() for _ in range(8)]
    await asyncio.gather(*[exchange(upstream, sink) for sink in sinks])
    assert all(sink.data == b"hello" for sink in sinks)
    assert server.connections == 8


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_chunked_reply_is_the_same_however_the_network_cuts_it(serve, size: int) -> None:
    wire = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n"
        b"5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
    )

    async def cut(reader, writer) -> None:
        for at in range(0, len(wire), size):
            writer.write(wire[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)

    _, upstream = await serve(cut)
    sink = Kept()
    await exchange(upstream, sink)
    assert (sink.status, sink.data) == (200, b"hello, world")
    assert (b"x-a", b"b") in sink.headers


async def test_many_chunks_in_one_read_are_one_call(serve) -> None:
    async def at_once(reader, writer) -> None:
        body = b"".join(b"3\r\nabc\r\n" for _ in range(50))
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n")

    _, upstream = await serve(at_once)
    sink = Kept()
    await exchange(upstream, sink)
    assert sink.data == b"abc" * 50
    assert sink.reads == 1


async def test_a_kept_connection_that_died_meanwhile_costs_one_fresh_one(serve) -> None:
    async def once_a_connection(reader, writer) -> None:
        if server.requests == 2:
            writer.transport.abort()  # took the request, then died: nothing was answered
        else:
            writer.write(HELLO)

    server, upstream = await serve(once_a_connection)
    await exchange(upstream, Kept())
    sink = Kept()
    await exchange(upstream, sink)
    assert sink.data == b"hello"
    assert (server.connections, server.requests) == (2, 3)


async def test_a_fresh_connection_that_dies_is_not_tried_again_here(serve) -> None:
    async def dies(reader, writer) -> None:
        writer.transport.abort()

    server, upstream = await serve(dies)
    with pytest.raises(ReplyLost) as caught:
        await exchange(upstream, Kept())
    assert not caught.value.answered
    assert server.requests == 1


async def test_a_connection_the_server_closed_while_idle_is_not_used(serve) -> None:
    async def closes_after(reader, writer) -> None:
        writer.write(HELLO)
        await writer.drain()
        writer.close()

    server, upstream = await serve(closes_after)
    await exchange(upstream, Kept())
    await until(lambda: server.closed == 1)
    await asyncio.sleep(0.02)
    await exchange(upstream, Kept())
    assert server.connections == 2


async def test_connection_close_is_honoured(serve) -> None:
    async def closing(reader, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")

    server, upstream = await serve(closing)
    for _ in range(2):
        await exchange(upstream, Kept())
    assert server.connections == 2


async def test_a_reply_without_a_length_ends_with_its_connection(serve) -> None:
    async def until_close(reader, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await writer.drain()
        writer.close()

    _, upstream = await serve(until_close)
    sink = Kept()
    await exchange(upstream, sink)
    assert sink.data == b"all of it"


@pytest.mark.parametrize(
    "wire",
    [
        b"this is not HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
async def test_a_reply_that_breaks_says_so_and_that_something_came(serve, wire: bytes) -> None:
    async def broken(reader, writer) -> None:
        writer.write(wire)
        await writer.drain()
        writer.close()

    _, upstream = await serve(broken)
    with pytest.raises(ReplyLost) as caught:
        await exchange(upstream, Kept())
    assert caught.value.answered


async def test_a_refused_connection_fails_at_once() -> None:
    server = Server(says_hello)
    await server.start()
    await server.stop()
    upstream = Upstream(f"http://127.0.0.1:{server.port}", connect_timeout_s=5)
    async with asyncio.timeout(1):
        with pytest.raises(ConnectFailed, match="no connection"):
            await exchange(upstream, Kept())


async def test_silence_before_and_within_a_reply_has_its_own_limit(serve) -> None:
    async def stalls(reader, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
        await says_nothing(reader, writer)

    loop = asyncio.get_running_loop()
    for script, first, idle in ((says_nothing, 0.1, 9), (stalls, 9, 0.1)):
        _, upstream = await serve(script)
        began = loop.time()
        with pytest.raises(ReplyTimeout):
            await exchange(upstream, Kept(), first=first, idle=idle)
        assert 0.05 < loop.time() - began < 0.6


async def test_a_reply_that_keeps_coming_outlives_the_idle_limit(serve) -> None:
    async def drips(reader, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n")
        for _ in range(8):
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(0.05)

    _, upstream = await serve(drips)
    sink = Kept()
    await exchange(upstream, sink, first=0.2, idle=0.2)
    assert sink.data == b"." * 8


async def test_cancelling_closes_the_connection(serve) -> None:
    server, upstream = await serve(says_nothing)
    task = asyncio.ensure_future(exchange(upstream, Kept()))
    await until(lambda: server.requests == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.closed == 1, within_s=1)


async def test_a_sink_with_enough_is_answered_and_the_connection_saved(serve) -> None:
    async def ends_late(reader, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nDONE\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.write(b"0\r\n\r\n")

    server, upstream = await serve(ends_late)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await exchange(upstream, Kept(enough_after=b"DONE"))
    assert loop.time() - began < 0.08
    await asyncio.sleep(0.2)
    await exchange(upstream, Kept(enough_after=b"DONE"))
    assert server.connections == 1


async def test_a_reset_after_the_sink_has_enough_is_success(serve) -> None:
    async def resets(reader, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nDONE\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()

    _, upstream = await serve(resets)
    await exchange(upstream, Kept(enough_after=b"DONE"))
    await asyncio.sleep(0.05)
    await exchange(upstream, Kept(enough_after=b"DONE"))


async def test_what_a_sink_refuses_ends_the_exchange(serve) -> None:
    class Refuses(Kept):
        def head(self, status: int, headers: Headers, flow: Flow) -> None:
            raise ReplyUnfit("not wanted")

    _, upstream = await serve(says_hello)
    with pytest.raises(ReplyUnfit, match="not wanted"):
        await exchange(upstream, Refuses())


async def test_a_paused_exchange_reads_no_more_and_is_not_timed_out(serve) -> None:
    total = 64 << 20

    async def floods(reader, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        for _ in range(total >> 20):
            writer.write(bytes(1 << 20))
            await writer.drain()

    class Counts(Kept):
        def body(self, data: bytes) -> bool:
            self.reads += len(data)
            return False

    _, upstream = await serve(floods)
    sink = Counts()
    task = asyncio.ensure_future(exchange(upstream, sink, first=0.1, idle=0.1))
    await until(lambda: sink.reads > 0)
    assert sink.flow is not None
    sink.flow.pause()
    await asyncio.sleep(0.05)
    seen = sink.reads
    await asyncio.sleep(0.3)
    assert sink.reads == seen
    assert seen < total
    sink.flow.resume()
    await task
    assert sink.reads == total


async def test_abandoning_ends_silent_exchanges_only(serve) -> None:
    async def two_kinds(reader, writer) -> None:
        if server.requests == 1:
            await says_nothing(reader, writer)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n")
        for _ in range(20):
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(0.02)

    server, upstream = await serve(two_kinds)
    silent = asyncio.ensure_future(exchange(upstream, Kept()))
    await until(lambda: server.requests == 1)
    lively = asyncio.ensure_future(exchange(upstream, Kept()))
    await asyncio.sleep(0.2)
    upstream.abandon(0.15, "silence")
    with pytest.raises(ReplyLost, match="silence"):
        await silent
    await lively


@pytest.mark.parametrize("url", ["replica:8000", "ftp://x", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        Upstream(url, connect_timeout_s=1)
