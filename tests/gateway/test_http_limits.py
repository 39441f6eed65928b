"""What may come over a client's socket, and what ends it: sizes, waits, and what is ambiguous."""

from __future__ import annotations

import asyncio
import gzip
import resource
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from scripted import BASE, Fleet, ScriptedReplica, read_reply, until

ASK = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
BODY = orjson.dumps(ASK)
HOST = b"host: x\r\n"
CHUNKED = HOST + b"transfer-encoding: chunked\r\n"


class Wire:
    """A raw connection to the gateway."""

    def __init__(self, it: Fleet, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.key = b"authorization: Bearer %b\r\n" % it.key.encode()

    def ask(self, body: bytes = BODY, *, more: bytes = b"") -> bytes:
        return b"POST /v1/chat/completions HTTP/1.1\r\n%b%b%bcontent-length: %d\r\n\r\n%b" % (
            HOST,
            self.key,
            more,
            len(body),
            body,
        )

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> tuple[int, dict[bytes, bytes], Any]:
        status, headers, parts = await read_reply(self.reader)
        body = b"".join(parts)
        return int(status.split()[1]), headers, orjson.loads(body) if body else None

    async def refused(self, status: int) -> dict[str, Any]:
        """An OpenAI error with this status, and then the end of the connection."""
        async with asyncio.timeout(5):
            got, headers, body = await self.reply()
            assert got == status, body
            assert headers[b"content-type"].startswith(b"application/json")
            assert headers[b"x-request-id"].startswith(b"req_")
            assert set(body["error"]) == {"message", "type", "param", "code"}
            assert await self.reader.read() == b""
        error: dict[str, Any] = body["error"]
        return error

    async def closed(self) -> bool:
        try:
            async with asyncio.timeout(5):
                return await self.reader.read() == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def wire(it: Fleet) -> AsyncIterator[Wire]:
    host, port = it.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield Wire(it, reader, writer)
    writer.close()


def replica() -> ScriptedReplica:
    return ScriptedReplica("replica-0")


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
AMBIGUOUS = {
    "two lengths that differ": HOST + b"content-length: 3\r\ncontent-length: 5\r\n\r\nabc",
    "two lengths that agree": HOST + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
    "a list of lengths": HOST + b"content-length: 3, 3\r\n\r\nabc",
    "a signed length": HOST + b"content-length: +3\r\n\r\nabc",
    "a negative length": HOST + b"content-length: -3\r\n\r\nabc",
    "a length too long": HOST + b"content-length: 99999999999999999999\r\n\r\nabc",
    "an empty length": HOST + b"content-length:\r\n\r\n",
    "length before coding": HOST + b"content-length: 3\r\n" + CHUNKED[9:] + b"\r\n0\r\n\r\n",
    "length after coding": CHUNKED + b"content-length: 3\r\n\r\n0\r\n\r\n",
    "an unknown coding": HOST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "chunked not last": HOST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a hidden coding": HOST + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": HOST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded header": HOST + b"x-a: b\r\n c\r\ncontent-length: 3\r\n\r\nabc",
    "a folded first line": b" " + HOST + b"\r\n",
    "a chunk size that is none": CHUNKED + b"\r\nzz\r\nabc\r\n0\r\n\r\n",
    "a chunk size with 0x": CHUNKED + b"\r\n0x3\r\nabc\r\n0\r\n\r\n",
    "a negative chunk": CHUNKED + b"\r\n-3\r\nabc\r\n0\r\n\r\n",
    "a chunk size too long": CHUNKED + b"\r\nFFFFFFFFFFFFFFFFF\r\nabc\r\n0\r\n\r\n",
    "a chunk longer than it says": CHUNKED + b"\r\n3\r\nabcd\r\n0\r\n\r\n",
    "chunks with bare line feeds": CHUNKED + b"\r\n3\nabc\n0\n\n",
    "two hosts": HOST + b"host: y\r\ncontent-length: 0\r\n\r\n",
    "no host": b"content-length: 0\r\n\r\n",
    "a NUL": HOST + b"x-a: a\x00b\r\n\r\n",
    "a bare carriage return": HOST + b"x-a: a\rb\r\n\r\n",
    "a header name with a space": HOST + b"x a: a\r\n\r\n",
}


async def test_what_could_be_read_in_two_ways_is_a_400_and_the_end(fleet) -> None:
    one = replica()
    async with fleet(one) as it:

        async def check(name: str, rest: bytes) -> None:
            async with wire(it) as raw:
                raw.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + raw.key + rest + SMUGGLED)
                error = await raw.refused(400)
                assert error["type"] == "invalid_request_error", name
                assert "not a valid HTTP request" in error["message"], name

        for name, rest in AMBIGUOUS.items():
            await check(name, rest)
        assert not one.received
        assert (await it.chat()).status_code == 200


async def test_garbage_and_other_versions_are_a_400(fleet) -> None:
    async with fleet(replica()) as it:
        for first in (
            b"NOT HTTP AT ALL\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/3.0\r\nhost: x\r\n\r\n",
            b"GET /v1/models HTTP/1.1\nhost: x\n\n",
        ):
            async with wire(it) as raw:
                raw.write(first)
                await raw.refused(400)


async def test_heads_that_are_too_large_are_a_431_however_they_come(fleet) -> None:
    listen = {"header_max_bytes": 4096}
    line, field = b"x" * 5000, b"x-a: " + b"a" * 1000 + b"\r\n"
    async with fleet(replica(), listen=listen) as it:
        for head in (
            b"POST /" + line + b" HTTP/1.1\r\n" + HOST,
            b"POST / HTTP/1.1\r\n" + HOST + b"x-a: " + line + b"\r\n",
            b"POST / HTTP/1.1\r\n" + HOST + line + b": a\r\n",
            b"POST / HTTP/1.1\r\n" + HOST + field * 5,
        ):
            async with wire(it) as raw:
                raw.write(head + b"\r\n")
                assert "4096 bytes" in (await raw.refused(431))["message"]
            async with wire(it) as raw:  # in pieces, and never complete
                for at in range(0, len(head), 900):
                    raw.write(head[at : at + 900])
                    await asyncio.sleep(0.002)
                await raw.refused(431)
        async with wire(it) as raw:  # a large body is no large head
            raw.write(raw.ask(orjson.dumps({**ASK, "user": "u" * 20_000})))
            assert (await raw.reply())[0] == 200


async def test_a_slow_head_is_a_408_and_a_slow_body_too(fleet) -> None:
    listen = {"header_timeout_s": 0.3, "body_timeout_s": 0.4}
    one = replica()
    async with fleet(one, listen=listen) as it:
        loop = asyncio.get_running_loop()
        async with wire(it) as raw:
            began = loop.time()

            async def drip() -> None:
                for byte in raw.ask():
                    raw.write(bytes([byte]))
                    await asyncio.sleep(0.05)

            dripping = asyncio.ensure_future(drip())
            assert (await raw.refused(408))["code"] == "request_timeout"
            assert 0.25 < loop.time() - began < 2
            dripping.cancel()
        async with wire(it) as raw:
            raw.write(raw.ask()[:-5])
            began = loop.time()
            status, _, body = await raw.reply()
            assert (status, body["error"]["code"]) == (408, "request_timeout")
            assert 0.3 < loop.time() - began < 2
        async with wire(it) as raw:  # a head in pieces that is in time, and then another
            for _ in range(2):
                for part in (raw.ask()[:30], raw.ask()[30:]):
                    raw.write(part)
                    await asyncio.sleep(0.1)
                assert (await raw.reply())[0] == 200
            await asyncio.sleep(0.5)  # no head has begun: that is no slow one
            raw.write(b"\r\n" + raw.ask())
            assert (await raw.reply())[0] == 200
        assert len(one.received) == 3


async def test_an_idle_connection_is_closed_and_a_running_one_never(fleet) -> None:
    one = replica()
    async with fleet(one, listen={"keepalive_s": 0.3, "header_timeout_s": 0.2}) as it:
        async with wire(it) as raw:  # it never said a word
            assert await raw.closed()
        async with wire(it) as raw:
            one.speak.clear()
            body = orjson.dumps({**ASK, "stream": True})
            raw.write(raw.ask(body) + raw.ask()[:20])  # the head behind it has to wait
            await until(lambda: one.received)
            await asyncio.sleep(0.7)
            one.speak.set()
            _, _, parts = await read_reply(raw.reader)
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
            raw.write(raw.ask()[20:])
            assert (await raw.reply())[0] == 200
            assert await raw.closed()


async def test_pipelined_requests_are_answered_in_order(fleet) -> None:
    one = ScriptedReplica("replica-0", adapters=("a", "b", "c"))
    async with fleet(one) as it, wire(it) as raw:
        names = ["a", "b", "nobody", "c"]
        raw.write(b"".join(raw.ask(orjson.dumps({**ASK, "model": name})) for name in names))
        replies = [await raw.reply() for _ in names]
        assert [status for status, _, _ in replies] == [200, 200, 404, 200]
        assert [body.get("model") for _, _, body in replies] == ["a", "b", None, "c"]
        raw.write(raw.ask() + b"NOT HTTP\r\n\r\n")
        assert (await raw.reply())[0] == 200
        await raw.refused(400)


async def test_a_client_that_expects_100_gets_it_and_other_hopes_are_a_417(fleet) -> None:
    async with fleet(replica()) as it:
        async with wire(it) as raw:
            whole = raw.ask(more=b"expect: 100-continue\r\n")
            raw.write(whole[: -len(BODY)])
            assert await raw.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            raw.write(BODY)
            assert (await raw.reply())[0] == 200
        async with wire(it) as raw:
            raw.write(raw.ask(more=b"expect: a-miracle\r\n"))
            await raw.refused(417)


async def test_chunked_bodies_are_read_whatever_their_chunks(fleet) -> None:
    one = replica()
    async with fleet(one) as it, wire(it) as raw:
        head = b"POST /v1/chat/completions HTTP/1.1\r\n" + raw.key + CHUNKED + b"\r\n"
        chunks = [b"%x;a=b\r\n%b\r\n" % (1, BODY[n : n + 1]) for n in range(len(BODY))]
        raw.write(head + b"".join(chunks) + b"0\r\nx-trailer: 1\r\n\r\n")
        assert (await raw.reply())[0] == 200
        assert one.received[0][1] == ASK


async def test_compressed_bodies_are_bounded_by_what_they_unpack_to(fleet) -> None:
    one, bombs = replica(), {}
    for name, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        bombs[name] = pack, pack(b" " * (100 << 20), 1)
        assert len(bombs[name][1]) < 1 << 20
    async with fleet(one, listen={"body_max_bytes": 1 << 20}) as it:
        path = "/v1/chat/completions"
        for name, (pack, bomb) in bombs.items():
            headers = {"content-encoding": name}
            good = await it.http.post(path, content=pack(BODY), headers=headers)
            assert good.status_code == 200
            assert "content-encoding" not in one.received[-1][0].headers
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer = await it.http.post(path, content=bomb, headers=headers)
            assert answer.status_code == 413
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert after - before < 40 << 10, "kilobytes"
            broken = await it.http.post(path, content=b"no " * 20, headers=headers)
            assert broken.status_code == 400
        for name in ("br", "zstd", "rot13", "gzip, gzip"):
            answer = await it.http.post(path, content=BODY, headers={"content-encoding": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                *(415, "unsupported_encoding"),
            )


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "CONNECT", "TRACE"])
async def test_other_methods_are_told_which_to_use(fleet, method: str) -> None:
    async with fleet(replica()) as it, wire(it) as raw:
        target = "a.b:1" if method == "CONNECT" else "/v1/chat/completions"
        raw.write(f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        whole = await raw.reader.read()
        head, _, body = whole.partition(b"\r\n\r\n")
        if method == "CONNECT":
            assert head.startswith(b"HTTP/1.1 404")
        else:
            assert head.startswith(b"HTTP/1.1 405")
            assert b"\r\nallow: post" in head.lower()
        assert b"access-control" not in head.lower()  # no page of another origin is let in
        if method == "HEAD":
            assert body == b""
        else:
            assert "error" in orjson.loads(body)
