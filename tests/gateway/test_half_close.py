"""A client that closes its side of the connection: it may still read, or be gone."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from scripted import BASE, DONE, WORDS, Fleet, ScriptedReplica, chunks, read_reply, until

ROADS = {"plain": b"", "framework": b"x-odd: \xc3\xa9\r\n"}
"""A header that gateway/edge/front.py leaves to the framework, or none."""


async def asked(
    it: Fleet, road: str, **body: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = it.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent = orjson.dumps({"model": BASE, "messages": [{"role": "user", "content": "hi"}], **body})
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n%b"
        b"content-length: %d\r\n\r\n%b" % (it.key.encode(), ROADS[road], len(sent), sent)
    )
    return reader, writer


async def final_reply(
    reader: asyncio.StreamReader,
) -> tuple[bytes, dict[bytes, bytes], list[bytes]]:
    """The one after any `100 Continue`."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 100 "):
            break
    again = asyncio.StreamReader()
    again.feed_data(head + await reader.read())
    again.feed_eof()
    return await read_reply(again)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_only_asks_no_more_gets_its_whole_answer(
    fleet, road: str, stream: bool
) -> None:
    one = ScriptedReplica("replica-0")
    one.answer = one.slow(0.5)
    async with fleet(one) as it:
        reader, writer = await asked(it, road, stream=stream)
        await until(lambda: one.received)
        writer.write_eof()
        status, headers, parts = await final_reply(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert headers[b"connection"] == b"close"
        if stream:
            assert (
                b"".join(parts).replace(b": keep-alive\n\n", b"") == b"".join(chunks(BASE)) + DONE
            )
        else:
            said = orjson.loads(parts[0])["choices"][0]["message"]["content"]
            assert said == "".join(WORDS)
        assert await reader.read() == b""  # and the connection is closed
        writer.close()
        assert one.left == []
        assert (await it.usage())[0]["ok"] == 1


@pytest.mark.parametrize("road", ROADS)
async def test_comments_in_mid_stream_stand_between_events(fleet, road: str) -> None:
    one = ScriptedReplica("replica-0")

    async def paced(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        for part in (*chunks(BASE), DONE):
            await response.write(part)
            await asyncio.sleep(0.1)
        return response

    one.answer = paced
    async with fleet(one) as it:
        reader, writer = await asked(it, road, stream=True)
        await until(lambda: one.received)
        await asyncio.sleep(0.15)
        writer.write_eof()
        _, _, parts = await read_reply(reader)
        text = b"".join(parts)
        assert text.count(b": keep-alive\n\n") >= 2
        assert text.replace(b": keep-alive\n\n", b"") == b"".join(chunks(BASE)) + DONE
        writer.close()


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("early", [False, True])
async def test_one_that_closes_altogether_is_gone_within_a_second(
    fleet, road: str, stream: bool, early: bool
) -> None:
    """Also when it first closes one side, and the other only later."""
    one = ScriptedReplica("replica-0")
    one.answer = one.freezes
    async with fleet(one) as it:
        _, writer = await asked(it, road, stream=stream)
        await until(lambda: one.received)
        if not early:
            writer.write_eof()
            await asyncio.sleep(0.3)
            assert one.left == []
        writer.close()
        await until(lambda: one.left, within_s=1.5 if not early else 1)
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 0, within_s=1)
        row = (await it.usage())[0]
        assert row["cut"] == 1


async def test_an_idle_connection_is_closed_with_its_client(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        reader, writer = await asked(it, "plain")
        await read_reply(reader)
        writer.write_eof()
        async with asyncio.timeout(1):
            assert await reader.read() == b""
        writer.close()
