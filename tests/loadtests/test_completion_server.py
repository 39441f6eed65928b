"""Both servers that stream at a pace read HTTP alike, however it is cut, and reply in chunks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import orjson
import pytest

from loadtests import paced_server, placed_server
from loadtests.completion_server import Completions
from loadtests.places import Engine, Places


def placed() -> Completions:
    engine = Engine(capacity=1, prefill_s=0.001, token_s=0.001)
    return placed_server.Connection(engine, Places(engine))


def paced() -> Completions:
    return paced_server.Paced(random.Random(1))


@pytest.mark.parametrize(
    ("server", "model", "events"),
    [(placed, placed_server.MODEL, 3), (paced, paced_server.MODEL, 4)],  # [DONE] included
)
async def test_requests_are_answered_one_after_the_other_however_they_are_cut(
    server: Callable[[], Completions], model: str, events: int
) -> None:
    body = {
        "messages": [{"content": "7 3 text"}],
        "seconds": 0.2,
        "stream_options": {"include_usage": True},
    }
    sent = orjson.dumps(body)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nContent-LENGTH: %d\r\n\r\n%b"
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(server, "127.0.0.1", 0)
    async with listener, asyncio.timeout(20):
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for size in (1, 40, 10**6):
            writer.write(b"GET /v1/models HTTP/1.1\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.rpartition(b"content-length: ")[2])
            listed = orjson.loads(await reader.readexactly(length))["data"]
            assert [one["id"] for one in listed] == [model]
            whole = request % (len(sent), sent)
            for at in range(0, len(whole), size):
                writer.write(whole[at : at + size])
                await asyncio.sleep(0)
            assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
            said = b""
            while length := int(await reader.readline(), 16):
                said += (await reader.readexactly(length + 2))[:-2]
            assert await reader.readline() == b"\r\n"
            assert said.endswith(b"data: [DONE]\n\n")
            assert said.count(b"data: ") == events
            assert b'"usage":' in said
        writer.close()
