"""OpenAI servers that hold places as long as a model would: `python -m loadtests.placed_server`.

    POST …/chat/completions   its message begins with two numbers, the tokens of its prompt and of
                              its reply: an event for the first token, and one for all others
    GET …                     a list of one model, "base"

A process of their own, so that their work is not taken for a gateway's. Prints their addresses, one
a line, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Final, cast

import orjson
import typer
import uvloop

from loadtests.places import Engine, Places

MODEL: Final = "base"
_JSON: Final = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_SSE: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LISTING: Final = orjson.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
_CHUNK: Final = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}


class Connection(asyncio.Protocol):
    """Its peer sends the next request after the last reply."""

    def __init__(self, engine: Engine, places: Places[Connection]) -> None:
        self._engine, self._places = engine, places
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._prompt = self._output = 0
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._buffer = rest
            self._transport.write(_JSON % (len(_LISTING), _LISTING))
            return
        lower = head.lower()
        length = int(lower[lower.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
        if len(rest) >= length:
            self._buffer = rest[length:]
            text = orjson.loads(rest[:length])["messages"][0]["content"]
            self._prompt, self._output = map(int, text.split()[:2])
            self._places.enter(self, self._prompt)
            self._begin()

    def _begin(self) -> None:
        for one, first_at in self._places.begin(self._loop.time()):
            one._timer = self._loop.call_at(first_at, one._first)

    def _first(self) -> None:
        choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
        self._transport.write(_SSE + _chunk(_event({**_CHUNK, "choices": [choice]})))
        self._timer = self._loop.call_later(self._output * self._engine.token_s, self._last)

    def _last(self) -> None:
        self._timer = None
        usage = {"prompt_tokens": self._prompt, "completion_tokens": self._output}
        usage["total_tokens"] = self._prompt + self._output
        last = _event({**_CHUNK, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        self._transport.write(_chunk(last) + b"0\r\n\r\n")
        self._leave()

    def _leave(self) -> None:
        self._places.leave(self)
        self._begin()


def _event(value: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _chunk(blob: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(blob), blob)


async def serve(engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(engine.replicas):
        places: Places[Connection] = Places(engine)
        server = await loop.create_server(
            lambda places=places: Connection(engine, places),  # type: ignore[misc]
            "127.0.0.1",
            0,
            backlog=1024,
        )
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main(
    replicas: Annotated[int, typer.Option(min=1)] = 4,
    capacity: Annotated[int, typer.Option(min=1, help="Places of each.")] = 16,
    prefill_s: Annotated[float, typer.Option(min=0)] = 0.2,
    prompt_token_s: Annotated[float, typer.Option(min=0)] = 0.0,
    token_s: Annotated[float, typer.Option(min=0)] = 0.04,
) -> None:
    engine = Engine(
        replicas=replicas,
        capacity=capacity,
        prefill_s=prefill_s,
        prompt_token_s=prompt_token_s,
        token_s=token_s,
    )
    uvloop.run(serve(engine))


if __name__ == "__main__":
    typer.run(main)
