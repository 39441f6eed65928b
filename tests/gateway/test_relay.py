"""What passes from a replica's bytes to a client's socket, and what is left out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from scripted import BASE, DONE, USAGE, chunk, chunks, event, read_reply, until, usage_event

from gateway.edge.connection import Connection
from gateway.edge.exchange import Headers, ReplyLost, ReplyUnfit
from gateway.edge.framework import Written as KnowsNothing
from gateway.edge.framework import reply_to
from gateway.edge.relay import Relay
from gateway.edge.reply import Reply
from shared.clock import monotonic
from shared.framing import FrameTooLong
from shared.messages import Usage

SSE: Headers = [(b"content-type", b"text/event-stream")]
COUNTED = Usage(prompt_tokens=7, completion_tokens=4, cached_tokens=2)
ANSWER = b"".join(chunks(BASE))


class Flow:
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def limit_silence(self, idle_s: float) -> None: ...


class Written:
    """Stands where the reply is: what the relay hands on, before any framing."""

    def __init__(self) -> None:
        self.data = b""
        self.blobs: list[bytes] = []
        self.raw = 0  # how often the raw lane was taken
        self.last = False

    def chunk(self, data: bytes, flow: object) -> bool:
        size, _, rest = data.partition(b"\r\n")
        assert int(size, 16) == len(rest) - 2
        assert rest.endswith(b"\n\n\r\n")
        self.raw += 1
        self.events(rest[:-2], [], flow, last=False)
        return True

    def events(self, blob: bytes, headers: Headers, flow: object, *, last: bool) -> None:
        assert not self.last, "nothing passes after the end"
        self.data += blob
        self.blobs.append(blob)
        self.last = last


def relayed(wire: bytes, *, keep_usage: bool, cuts: list[int] | None = None) -> tuple:
    reply = Written()
    relay = Relay(reply, stream=True, keep_usage=keep_usage, clock=monotonic)  # type: ignore[arg-type]
    relay.head(200, SSE, Flow())
    edges = [0, *sorted(cut % (len(wire) + 1) for cut in cuts or []), len(wire)]
    for start, stop in pairwise(edges):
        if relay.body(wire[start:stop]):
            break
    return relay, reply


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_a_stream_split_at_any_byte_is_the_same(end: bytes) -> None:
    wire = (ANSWER + usage_event(BASE) + DONE).replace(b"\n\n", end)
    for at in range(len(wire) + 1):
        relay, reply = relayed(wire, keep_usage=True, cuts=[at])
        assert reply.data == wire
        assert reply.last
        assert relay.finished
        assert relay.usage == COUNTED
        assert relay.data_events == len(chunks(BASE)) + 2
        assert all(blob.endswith(end) for blob in reply.blobs)


@given(cuts=st.lists(st.integers(0, 10_000), max_size=30), keep=st.booleans())
def test_only_the_usage_event_is_left_out_and_only_when_not_asked_for(
    cuts: list[int], keep: bool
) -> None:
    wire = ANSWER + b": note\n\n" + usage_event(BASE) + DONE
    relay, reply = relayed(wire, keep_usage=keep, cuts=cuts)
    assert reply.data == (wire if keep else ANSWER + b": note\n\n" + DONE)
    assert relay.usage == COUNTED
    assert relay.finished


def test_usage_told_in_every_chunk_is_kept_and_the_last_counts() -> None:
    said = [
        event({**chunk(BASE, {"content": "x"}), "usage": {**USAGE, "completion_tokens": n}})
        for n in range(1, 4)
    ]
    relay, reply = relayed(b"".join(said) + DONE, keep_usage=False)
    assert reply.data == b"".join(said) + DONE
    assert relay.usage == Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2)


def test_null_usage_is_not_looked_into() -> None:
    said = event({**chunk(BASE, {"content": "x"}), "usage": None})
    relay, reply = relayed(said + DONE, keep_usage=False)
    assert reply.data == said + DONE
    assert relay.usage is None


@pytest.mark.parametrize(
    "tail",
    [
        {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}},
        {"usage": {"prompt_tokens": 0, "completion_tokens": 0}},  # an engine that forgets choices
    ],
)
def test_an_explicit_zero_is_a_fact(tail: dict) -> None:
    relay, reply = relayed(ANSWER + event(tail) + DONE, keep_usage=False)
    assert relay.usage == Usage()
    assert reply.data == ANSWER + DONE


def test_text_that_speaks_of_usage_or_of_done_is_text() -> None:
    words = ('{"usage":{"prompt_tokens":9}}', "data: [DONE]", "[DONE]", "\n\ndata: x\n\n")
    wire = b"".join(chunks(BASE, words))
    relay, reply = relayed(wire, keep_usage=False)
    assert reply.data == wire
    assert relay.usage is None
    assert not relay.finished
    assert relay.data_events == len(words) + 2


@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n"])
def test_done_ends_the_reply_at_once(done: bytes) -> None:
    relay, reply = relayed(ANSWER + done, keep_usage=False)
    assert reply.last
    assert relay.finished


def test_an_unfinished_event_never_passes() -> None:
    relay, reply = relayed(ANSWER + b'data: {"choi', keep_usage=False)
    assert reply.data == ANSWER
    assert not relay.finished


def test_comments_pass_but_are_not_tokens() -> None:
    relay, reply = relayed(b": queued\n\n: queued\n\n", keep_usage=False)
    assert reply.data == b": queued\n\n: queued\n\n"
    assert relay.data_events == 0
    assert relay.first_at is None


def test_the_replicas_own_error_event_is_known() -> None:
    relay, _ = relayed(ANSWER + event({"error": {"message": "x"}}), keep_usage=False)
    assert relay.told_error()
    relay, _ = relayed(ANSWER, keep_usage=False)
    assert not relay.told_error()


def test_an_event_without_end_is_bounded() -> None:
    relay = Relay(Written(), stream=True, keep_usage=False, clock=monotonic)  # type: ignore[arg-type]
    relay.head(200, SSE, Flow())
    for _ in range(63):
        assert not relay.body(bytes(1 << 16))
    with pytest.raises(FrameTooLong):
        relay.body(bytes(1 << 17))


def test_a_stream_of_another_type_is_unfit() -> None:
    relay = Relay(Written(), stream=True, keep_usage=False, clock=monotonic)  # type: ignore[arg-type]
    with pytest.raises(ReplyUnfit, match="text/html"):
        relay.head(200, [(b"content-type", b"text/html")], Flow())


# The raw lane -----------------------------------------------------------------------------------


class Transport:
    """Stands where a replica's socket is."""

    def write(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool:
        return False


class Pool:
    def idle(self, connection: Connection) -> None: ...
    def ended(self, connection: Connection) -> None: ...


async def received(
    reads: list[bytes], *, keep_usage: bool, asked: str = ""
) -> tuple[Relay, Written, Connection]:
    """What a replica sends in these reads, through its connection to the client."""
    reply = Written()
    connection = Connection(Pool(), asyncio.get_running_loop())
    connection.connection_made(Transport())  # type: ignore[arg-type]
    relay = Relay(reply, stream=True, keep_usage=keep_usage, clock=monotonic, asked=asked)  # type: ignore[arg-type]
    exchange = asyncio.ensure_future(connection.run(b"", relay, 10, 10))
    await asyncio.sleep(0)
    for read in reads:
        connection.data_received(read)
    await exchange
    return relay, reply, connection


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


def framed(chunk: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(chunk), chunk)


@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    joined=st.lists(st.integers(1, 3), min_size=1, max_size=8),
    renamed=st.booleans(),
    keep=st.booleans(),
)
async def test_however_reads_and_chunks_fall_the_client_sees_the_same(
    cuts: list[int], joined: list[int], renamed: bool, keep: bool
) -> None:
    said = [*chunks(BASE), b": note\n\n", usage_event(BASE), DONE]
    wire, left = STREAM_HEAD, list(said)
    for count in joined * len(said):
        if left:
            wire += framed(b"".join(left[:count]))
            del left[:count]
    wire += b"0\r\n\r\n"
    edges = [0, *sorted({cut % len(wire) for cut in cuts}), len(wire)]
    reads = [wire[start:stop] for start, stop in pairwise(edges) if start < stop]
    asked = "an/other:name" if renamed else BASE
    relay, reply, _ = await received(reads, keep_usage=keep, asked=asked)
    wanted = b"".join(one for one in said if keep or one != usage_event(BASE))
    quoted = b'"model":"' + BASE.encode() + b'"'
    assert reply.data == wanted.replace(quoted, b'"model":"' + asked.encode() + b'"')
    assert relay.usage == COUNTED
    assert relay.finished
    assert reply.last


@pytest.mark.parametrize("asked", [BASE, "other"])
async def test_a_read_that_is_one_chunk_of_events_takes_the_raw_lane(asked: str) -> None:
    said = chunks(BASE)
    reads = [STREAM_HEAD, *map(framed, [*said, usage_event(BASE), DONE]), b"0\r\n\r\n"]
    relay, reply, connection = await received(reads, keep_usage=False, asked=asked)
    assert reply.raw == len(said) - 1  # the first is looked into
    assert relay.data_events == len(said) + 1  # and [DONE]
    assert relay.usage == COUNTED
    assert not connection.closed, "the parser never lost its place"


@pytest.mark.parametrize(
    "odd",
    [
        lambda chunk: b"%X;x=1\r\n%b\r\n" % (len(chunk), chunk),
        lambda chunk: b"0%x\r\n%b\r\n" % (len(chunk), chunk),
        lambda chunk: framed(chunk[:9]) + framed(chunk[9:]),
        lambda chunk: framed(chunk) + framed(chunk),
    ],
)
async def test_a_frame_that_is_not_plain_is_parsed(odd: Callable[[bytes], bytes]) -> None:
    said = chunks(BASE)
    reads = [STREAM_HEAD, *map(odd, said), framed(DONE), b"0\r\n\r\n"]
    _, reply, _ = await received(reads, keep_usage=False)
    times = 2 if len(odd(said[0])) > 2 * len(said[0]) else 1
    assert reply.raw == 0
    assert reply.data == b"".join(one * times for one in said) + DONE


async def test_usage_that_straddles_two_reads_is_still_left_out() -> None:
    told = usage_event(BASE)
    for cut in range(1, len(told)):
        reads = [STREAM_HEAD, framed(ANSWER), framed(told[:cut]), framed(told[cut:])]
        relay, reply, _ = await received([*reads, framed(DONE), b"0\r\n\r\n"], keep_usage=False)
        assert reply.data == ANSWER + DONE, f"cut at byte {cut}"
        assert relay.usage == COUNTED


async def test_a_size_line_cut_in_two_is_no_chunk_of_its_own() -> None:
    """The rest of a cut size line may look like a chunk; the parser is in the middle of it."""
    inner = b"data: x\n\n"
    text = b"data: " + framed(inner) + b"y\n\n"  # an event that holds what looks like a chunk
    reads = [STREAM_HEAD, framed(ANSWER), b"%x\r\ndata: " % len(text), framed(inner), b"y\n\n\r\n"]
    _, reply, _ = await received([*reads, framed(DONE), b"0\r\n\r\n"], keep_usage=False)
    assert reply.raw == 0
    assert reply.data == ANSWER + text + DONE


async def test_the_raw_lane_ends_when_the_replica_says_an_error() -> None:
    wrong = event({"error": {"message": "x"}})
    reads = [STREAM_HEAD, framed(ANSWER), framed(wrong), b"0\r\n\r\n"]
    relay, reply, _ = await received(reads, keep_usage=False)
    assert reply.raw == 1
    assert relay.told_error()


async def test_a_second_reply_after_the_first_is_not_trusted() -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
    with pytest.raises(ReplyLost):
        await received([one + one], keep_usage=False)


# The reply on a real socket ---------------------------------------------------------------------

Serve = Callable[[Callable[[Reply], Awaitable[None]]], Awaitable[int]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """A server whose handler writes one reply by hand; gives its port."""
    runners: list[web.AppRunner] = []

    async def start(write: Callable[[Reply], Awaitable[None]], stall_s: float = 5.0) -> int:
        async def handle(request: web.Request) -> web.StreamResponse:
            await request.read()
            reply = reply_to(request, stall_s=stall_s)
            reply.headers["x-request-id"] = "r1"
            try:
                await write(reply)
            finally:
                reply.close()
            return KnowsNothing(keep_alive=reply.reusable)

        app = web.Application()
        app.router.add_route("*", "/", handle)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return site.port

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_a_stream_and_a_plain_reply_follow_each_other_on_one_connection(serve) -> None:
    turns = iter(("stream", "plain", "stream"))

    async def write(reply: Reply) -> None:
        if next(turns) == "plain":
            return reply.whole(404, [(b"content-type", b"application/json")], b'{"a":1}')
        reply.events(
            ANSWER, [*SSE, (b"x-engine", b"e"), (b"connection", b"close")], None, last=False
        )
        reply.events(DONE, SSE, None, last=True)

    port = await serve(write)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for kind in ("stream", "plain", "stream"):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi")
        status, headers, parts = await read_reply(reader)
        assert headers[b"x-request-id"] == b"r1"
        assert b"date" in headers
        assert b"connection" not in headers
        if kind == "plain":
            assert status == b"HTTP/1.1 404 Not Found"
            assert parts == [b'{"a":1}']
            assert headers[b"content-type"] == b"application/json"
        else:
            assert status == b"HTTP/1.1 200 OK"
            assert parts == [ANSWER, DONE]
            assert headers[b"content-type"] == b"text/event-stream"
            assert headers[b"cache-control"] == b"no-cache"
            assert headers[b"x-accel-buffering"] == b"no"
            assert headers[b"x-engine"] == b"e"
    writer.close()


async def test_an_http_1_0_client_gets_plain_bytes_and_a_close(serve) -> None:
    async def write(reply: Reply) -> None:
        reply.events(ANSWER, SSE, None, last=False)
        reply.events(DONE, SSE, None, last=True)

    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(write))
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    _, headers, parts = await read_reply(reader)
    assert parts == [ANSWER + DONE]
    assert headers[b"connection"] == b"close"
    writer.close()


async def test_a_client_that_asks_for_close_gets_it(serve) -> None:
    async def write(reply: Reply) -> None:
        reply.whole(200, [], b"x")

    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(write))
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    _, headers, _ = await read_reply(reader)
    assert headers[b"connection"] == b"close"
    assert await reader.read() == b""
    writer.close()


async def test_a_waiting_stream_gets_its_head_and_comments_in_time(serve) -> None:
    loop = asyncio.get_running_loop()

    async def write(reply: Reply) -> None:
        reply.keep_awake(0.1)
        await asyncio.sleep(0.35)
        reply.events(ANSWER, SSE, None, last=False)
        await asyncio.sleep(0.15)
        reply.events(DONE, SSE, None, last=True)
        await asyncio.sleep(0.15)

    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(write))
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    began = loop.time()
    await reader.readuntil(b"\r\n\r\n")
    assert 0.08 < loop.time() - began < 0.2
    body = await reader.readuntil(b"0\r\n\r\n")
    assert body.count(b": keep-alive\n\n") == 4  # three before the answer, one within
    assert body.index(ANSWER) < body.rindex(b": keep-alive") < body.index(DONE)
    writer.close()


async def test_comments_and_errors_of_ours_stand_between_raw_chunks(serve) -> None:
    said = chunks(BASE)

    async def write(reply: Reply) -> None:
        assert not reply.chunk(framed(said[0]), Flow()), "the head comes first"
        reply.events(said[0], SSE, None, last=False)
        reply.keep_awake(0.1)
        assert reply.chunk(framed(said[1]), Flow())
        await asyncio.sleep(0.15)
        assert reply.chunk(framed(said[2]), Flow())
        reply.end(b'data: {"error":{}}\n\n')

    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(write))
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    _, _, parts = await read_reply(reader)
    assert parts == [*said[:2], b": keep-alive\n\n", said[2], b'data: {"error":{}}\n\n']
    writer.close()


async def test_a_failure_inside_a_stream_is_its_last_event(serve) -> None:
    async def write(reply: Reply) -> None:
        reply.events(ANSWER, SSE, None, last=False)
        reply.end(b'data: {"error":{}}\n\n')

    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(write))
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    _, _, parts = await read_reply(reader)
    assert parts == [ANSWER, b'data: {"error":{}}\n\n']
    writer.close()


class Held(Flow):
    def __init__(self) -> None:
        self.told: list[str] = []

    def pause(self) -> None:
        self.told.append("pause")

    def resume(self) -> None:
        self.told.append("resume")


async def test_a_slow_reader_holds_the_replica_back_until_it_has_read(serve) -> None:
    flow, big = Held(), event("x" * (1 << 20))

    async def write(reply: Reply) -> None:
        count = 0
        while flow.told != ["pause"]:
            reply.events(big, SSE, flow, last=False)
            count += 1
            assert count < 64, "never paused"
            await asyncio.sleep(0)
        await until(lambda: flow.told == ["pause", "resume"])
        reply.events(DONE, SSE, flow, last=True)

    reader, writer = await asyncio.open_connection("127.0.0.1", await serve(write), limit=1 << 22)
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: flow.told == ["pause"])
    await asyncio.sleep(0.1)
    assert flow.told == ["pause"]
    writer.transport.resume_reading()
    _, _, parts = await read_reply(reader)
    assert parts[-1] == DONE
    assert set(parts[:-1]) == {big}
    writer.close()


async def test_a_reader_that_never_reads_is_cut_off(serve) -> None:
    flow, big, cut = Held(), event("x" * (1 << 20)), asyncio.Event()

    async def write(reply: Reply) -> None:
        try:
            while not flow.told:
                reply.events(big, SSE, flow, last=False)
                await asyncio.sleep(0)
            await asyncio.sleep(5)
        finally:
            cut.set()

    port = await serve(write, stall_s=0.2)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(2):
        await cut.wait()
    assert flow.told == ["pause", "resume"]
    writer.close()


# `model` in the raw lane ------------------------------------------------------------------------

TELLING = st.sampled_from(
    [
        '"model":"base"',
        '\\"model\\":\\"base\\"',
        "{",
        "}",
        '","model":"base","x":"',
        "\n",
        "é",
        "\\",
    ]
)


@given(texts=st.lists(st.lists(TELLING, max_size=6).map("".join), min_size=1, max_size=8))
def test_the_raw_lane_corrects_model_and_no_text_whatever_it_says(texts: list[str]) -> None:
    said = [{**chunk("base", {"content": text}), "nested": {"model": "base"}} for text in texts]
    reply = Written()
    relay = Relay(
        reply,  # type: ignore[arg-type]
        stream=True,
        keep_usage=False,
        clock=monotonic,
        asked="org/pirate:v2",
    )
    relay.head(200, SSE, Flow())
    relay.body(event(chunk("base", {"role": "assistant"})))
    for one in said:
        assert relay.chunk(framed(event(one)))
    assert reply.raw == len(said)
    told = [orjson.loads(blob.removeprefix(b"data: ")) for blob in reply.blobs[1:]]
    assert told == [{**one, "model": "org/pirate:v2"} for one in said]
    assert relay.data_events == len(said) + 1


@pytest.mark.parametrize(
    "odd",
    [
        b"0" + framed(event(chunk("base", {}))),  # a size with a zero before it
        framed(event(chunk("base", {})))[:-1],
        framed(event(chunk("base", {}))) + framed(event(chunk("base", {}))),
        framed(event(chunk("base", {})) + event(chunk("base", {}))),
        framed(event(chunk("base", {}))[:-1]),
        framed(DONE),
        framed(usage_event("base")),
        framed(b": a comment\n\n"),
        framed(event(chunk("base", {}))).replace(b"\r\n", b";x\r\n", 1),
    ],
)
def test_what_is_not_plainly_one_event_in_one_chunk_is_no_matter_of_the_raw_lane(
    odd: bytes,
) -> None:
    relay = Relay(Written(), stream=True, keep_usage=False, clock=monotonic)  # type: ignore[arg-type]
    relay.head(200, SSE, Flow())
    relay.body(event(chunk("base", {})))
    assert not relay.chunk(odd)
