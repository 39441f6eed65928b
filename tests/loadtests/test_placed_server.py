"""Servers of places: no more at once than they have, in order; who leaves gives its place back."""

from __future__ import annotations

import asyncio

import orjson
from hypothesis import given
from hypothesis import strategies as st

from loadtests.placed_server import MODEL, Connection
from loadtests.places import Engine, Places


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60), st.integers(1, 4))
def test_never_more_than_its_places_and_first_in_first_out(
    steps: list[tuple[bool, int]], capacity: int
) -> None:
    places: Places[int] = Places(Engine(capacity=capacity, prefill_s=1.0, prompt_token_s=0.5))
    begun: list[int] = []
    held: set[int] = set()
    entered, last = 0, 0.0
    for now, (enters, which) in enumerate(steps):
        if enters:
            places.enter(entered, which)
            entered += 1
        elif held:
            left = sorted(held)[which % len(held)]
            places.leave(left)
            held.discard(left)
        for who, first_at in places.begin(float(now)):
            begun.append(who)
            held.add(who)
            assert first_at >= max(now + 1.0, last), "prompts are read in turn"
            last = first_at
        assert len(held) <= capacity
        assert len(held) == capacity or len(begun) == entered, "none waits beside a free place"
    assert begun == sorted(begun)


async def test_who_leaves_gives_its_place_to_the_next() -> None:
    engine = Engine(capacity=1, prefill_s=0.01, token_s=0.001)
    places: Places[Connection] = Places(engine)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine, places), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def ask(output: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        message = {"role": "user", "content": f"7 {output} text"}
        body = orjson.dumps({"model": MODEL, "messages": [message]})
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        return reader, writer

    async with asyncio.timeout(10):
        _, leaver = await ask(10**6)
        await asyncio.sleep(0.02)
        reader, writer = await ask(3)
        waiting = asyncio.ensure_future(reader.readuntil(b"\r\n0\r\n\r\n"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        leaver.close()
        said = await waiting
        assert b'"completion_tokens":3' in said
        assert b'"prompt_tokens":7' in said
        writer.close()
    server.close()
