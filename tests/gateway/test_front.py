"""The short way in: plain requests are answered, all else is aiohttp's, and no byte is lost."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import BASE, Fleet, ScriptedReplica, read_reply, until

from gateway.edge import front, plain
from gateway.edge.plain import plain_head
from shared.trace_context import NO_TRACE

LINE = b"POST /v1/chat/completions HTTP/1.1\r\n"
HEAD = LINE + b"Host: x\r\nContent-Length: 2\r\n"


def request(it: Fleet, *more: bytes, body: bytes | None = None, length: bool = True) -> bytes:
    if body is None:
        body = orjson.dumps({"model": BASE, "messages": []})
    lines = [b"Host: x", b"Authorization: Bearer " + it.key.encode(), *more]
    if length:
        lines.append(b"Content-Length: %d" % len(body))
    return LINE + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


async def connected(it: Fleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = it.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


# What is plain ----------------------------------------------------------------------------------


def test_a_plain_head_is_read_as_it_is_written() -> None:
    found = plain_head(HEAD + b"X-Odd:  a b \t\r\nEmpty:\r\nConnection: Keep-Alive\r\n")
    assert found is not None
    head, length = found
    assert head.path == "/v1/chat/completions"
    assert length == 2
    assert head.fields["x-odd"] == "a b"
    assert head.fields["empty"] == ""
    assert head.passed == b"X-Odd: a b\r\nEmpty: \r\n"


def test_heads_that_differ_in_length_alone_are_one() -> None:
    one, other = (LINE + b"Host: x\r\nContent-Length: %d\r\nX-A: 1\r\n" % n for n in (5, 77))
    (head, length), (same, more) = plain_head(one), plain_head(other)  # type: ignore[misc]
    assert head is same
    assert (length, more) == (5, 77)
    different = plain_head(other.replace(b"X-A: 1", b"X-A: 2"))
    assert different is not None
    assert different[0].fields["x-a"] == "2"


def test_heads_that_differ_in_their_trace_alone_are_one_and_keep_each_its_own() -> None:
    def traced(trace: bytes) -> bytes:
        return HEAD + b"Traceparent: " + trace + b" \r\ntracestate:a=b\r\nX-B: 1\r\n"

    plain._remembered.clear()
    heads = [plain_head(traced(b"00-%032x-1-01" % number)) for number in range(1, 4)]
    assert [found[0].trace.parent for found in heads if found] == [
        f"00-{number:032x}-1-01" for number in range(1, 4)
    ]
    assert {found[0].trace.state for found in heads if found} == {"a=b"}
    assert {found[0].passed for found in heads if found} == {b"X-B: 1\r\n"}
    assert len(plain._remembered) == 1
    untraced = plain_head(HEAD + b"X-B: 1\r\n")
    assert untraced is not None
    assert untraced[0].trace is NO_TRACE
    assert len(plain._remembered) == 1


@pytest.mark.parametrize("more", [b"traceparent: 1\r\nTraceParent: 2\r\n", b"tracestate:\r\n"])
def test_a_trace_that_is_odd_is_not_ours_to_read(more: bytes) -> None:
    assert plain_head(HEAD + more) is None


def test_remembered_heads_are_bounded() -> None:
    for number in range(3 * plain._REMEMBERED_MAX):
        assert plain_head(HEAD + b"X-Number: %d\r\n" % number) is not None
    assert len(plain._remembered) <= plain._REMEMBERED_MAX


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n",
        b"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: 2\r\n",
        b"POST /v1/chat/completions?a=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n",
        b"POST  /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n",
        LINE,
        LINE + b"Host: x\r\n",
        LINE + b"Content-Length: 2\r\n",
        LINE + b"Host: x\r\nContent-Length: +2\r\n",
        LINE + b"Host: x\r\nContent-Length: 2, 2\r\n",
        LINE + b"Host: x\r\nContent-Length: 0x2\r\n",
        LINE + b"Host: x\r\nContent-Length: 1000000000\r\n",
        HEAD + b"content-length: 2\r\n",
        HEAD + b"content-length: 3\r\n",
        HEAD + b"HOST: y\r\n",
        HEAD + b"Authorization: a\r\nauthorization: b\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n",
        HEAD + b"Transfer-Encoding : chunked\r\n",
        HEAD + b"Content-Encoding: gzip\r\n",
        HEAD + b"Expect: 100-continue\r\n",
        HEAD + b"Upgrade: websocket\r\n",
        HEAD + b"Connection: close\r\n",
        HEAD + b"Connection: x-drop\r\n",
        HEAD + b"X-Folded: a\r\n b\r\n",
        HEAD + b"X-Folded: a\r\n b: c\r\n",
        HEAD + b"X-Name With: a\r\n",
        HEAD + b"X-Bare: a\nX-Line: b\r\n",
        HEAD + b"X-Return: a\rb\r\n",
        HEAD + b"X-Nul: a\0b\r\n",
        HEAD + b"X-High: \xff\r\n",
        HEAD + b": nameless\r\n",
        HEAD + b"no colon\r\n",
    ],
)
def test_what_takes_judgement_is_not_plain(head: bytes) -> None:
    assert plain_head(head) is None


@given(st.binary(max_size=80))
def test_a_head_is_plain_only_if_all_of_it_is_fields(noise: bytes) -> None:
    found = plain_head(HEAD + noise + b"\r\n")
    if found is not None:
        fields = {"content-length": str(found[1]), **found[0].fields}
        came = (HEAD + noise).decode().split("\r\n")[1:]
        told = [line.partition(":") for line in came if line]
        assert fields == {name.lower(): value.strip(" \t") for name, _, value in told}


# On a connection --------------------------------------------------------------------------------


async def test_a_request_split_at_any_byte_is_answered_the_same(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        wire = request(it)

        async def cuts(first: int) -> None:
            reader, writer = await connected(it)
            for cut in range(first, len(wire), 8):
                writer.write(wire[:cut])
                await asyncio.sleep(0.002)
                writer.write(wire[cut:])
                status, _, _ = await read_reply(reader)
                assert status == b"HTTP/1.1 200 OK", f"cut at byte {cut}"
            writer.close()

        await asyncio.gather(*[cuts(first) for first in range(1, 9)])


async def test_requests_sent_ahead_are_answered_in_order(fleet) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        reader, writer = await connected(it)
        bodies = [orjson.dumps({"model": BASE, "messages": [], "user": str(n)}) for n in range(5)]
        wire = b"".join(request(it, body=body) for body in bodies)
        writer.write(wire[:-7])
        await asyncio.sleep(0.05)
        writer.write(wire[-7:])
        for _ in bodies:
            assert (await read_reply(reader))[0] == b"HTTP/1.1 200 OK"
        assert [body["user"] for _, body in one.received] == ["0", "1", "2", "3", "4"]
        writer.close()


async def test_one_connection_carries_plain_requests_and_others(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        reader, writer = await connected(it)
        body = orjson.dumps({"model": BASE, "messages": []})
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        for wire in (
            request(it),
            request(it),
            request(it, b"Transfer-Encoding: chunked", body=chunked, length=False),
            b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
            request(it),
        ):
            writer.write(wire)
            assert (await read_reply(reader))[0] == b"HTTP/1.1 200 OK"
        writer.close()


async def test_a_smuggled_request_is_refused_and_its_connection_closed(fleet) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        for forged in (b"Content-Length: 4", b"Transfer-Encoding: chunked", b"Host: y"):
            reader, writer = await connected(it)
            writer.write(request(it, forged) + request(it))
            assert (await read_reply(reader))[0].split()[1] == b"400"
            assert await reader.read() == b""
            writer.close()
        assert one.received == []


async def test_refusals_have_the_shape_of_the_api_and_keep_the_connection(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        reader, writer = await connected(it)
        for body, status in ((b"{", b"400"), (b'{"model":"no"}', b"404")):
            writer.write(request(it, body=body))
            line, headers, parts = await read_reply(reader)
            assert line.split()[1] == status
            assert headers[b"content-type"] == b"application/json"
            assert headers[b"x-request-id"].startswith(b"req_")
            assert set(orjson.loads(parts[0])["error"]) == {"message", "type", "param", "code"}
        writer.write(request(it))
        assert (await read_reply(reader))[0] == b"HTTP/1.1 200 OK"
        writer.close()


async def test_a_body_that_stops_half_way_is_given_up_in_time(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0"), listen={"body_timeout_s": 0.3}) as it:
        reader, writer = await connected(it)
        writer.write(request(it)[:-3])
        assert (await read_reply(reader))[0].split()[1] == b"408"
        writer.close()


async def test_a_silent_connection_is_closed_after_its_time(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0"), listen={"keepalive_s": 0.2}) as it:
        (silent, one), (used, two) = await connected(it), await connected(it)
        two.write(request(it))
        await read_reply(used)
        async with asyncio.timeout(2):
            assert await silent.read() == b""
            assert await used.read() == b""
        one.close()
        two.close()


async def test_a_client_that_leaves_ends_its_request_at_the_replica(fleet) -> None:
    one = ScriptedReplica("replica-0")
    one.speak.clear()
    async with fleet(one) as it:
        _, writer = await connected(it)
        body = orjson.dumps({"model": BASE, "messages": [], "stream": True})
        writer.write(request(it, body=body))
        await until(lambda: one.received)
        writer.transport.abort()
        await until(lambda: one.left, within_s=1)


async def test_a_body_of_many_reads_passes_whole(fleet) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        reader, writer = await connected(it)
        for size in (100_000, 900_000, 10):
            writer.write(request(it, body=orjson.dumps({"model": BASE, "user": "x" * size})))
            assert (await read_reply(reader))[0] == b"HTTP/1.1 200 OK"
            assert len(one.received[-1][1]["user"]) == size
        writer.close()


async def test_the_time_of_one_body_is_not_taken_for_that_of_the_next(fleet, monkeypatch) -> None:
    """Of requests with one head: a timer left over would give bytes to a reader twice."""
    monkeypatch.setattr(front, "_GATHER_S", 0.2)
    async with fleet(ScriptedReplica("replica-0")) as it:
        reader, writer = await connected(it)
        whole = request(it)
        head, body = whole[: whole.index(b"\r\n\r\n") + 4], whole[whole.index(b"\r\n\r\n") + 4 :]
        for pause_s in (0.0, 0.15, 0.1, 0.0):  # head and body apart, and then time for old timers
            writer.write(head)
            await asyncio.sleep(pause_s)
            writer.write(body)
            status, _, _ = await read_reply(reader)
            assert status == b"HTTP/1.1 200 OK"
            await asyncio.sleep(0.12)
        writer.close()
