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
from typing import Annotated, Any, Final

import typer
import uvloop

from loadtests.completion_server import DONE, END, SSE, Completions, chunk, event
from loadtests.places import Engine, Places

MODEL: Final = "base"
_CHUNK: Final = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}


class Connection(Completions):
    def __init__(self, engine: Engine, places: Places[Connection]) -> None:
        super().__init__(MODEL)
        self._engine, self._places = engine, places
        self._prompt = self._output = 0

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def asked(self, body: dict[str, Any]) -> None:
        self._prompt, self._output = map(int, body["messages"][0]["content"].split()[:2])
        self._places.enter(self, self._prompt)
        self._begin()

    def _begin(self) -> None:
        for one, first_at in self._places.begin(self.loop.time()):
            one.timer = self.loop.call_at(first_at, one._first)

    def _first(self) -> None:
        choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
        self.transport.write(SSE + chunk(event({**_CHUNK, "choices": [choice]})))
        self.timer = self.loop.call_later(self._output * self._engine.token_s, self._last)

    def _last(self) -> None:
        self.timer = None
        usage = {"prompt_tokens": self._prompt, "completion_tokens": self._output}
        usage["total_tokens"] = self._prompt + self._output
        last = event({**_CHUNK, "choices": [], "usage": usage}) + DONE
        self.transport.write(chunk(last) + END)
        self._leave()

    def _leave(self) -> None:
        self._places.leave(self)
        self._begin()


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
