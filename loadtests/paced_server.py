"""An OpenAI server that streams at a model's pace: `python -m loadtests.paced_server`.

An event about every 100 ms, replies of 20 to 60 s, now and then a silence and then several events
at once, as an engine under load does it. Each event says when it was written, on the clock that
all processes of the machine share, so that a client knows how late it came.

    POST …/chat/completions   {"seconds": how long the reply shall take, else as drawn}
    GET …                     a list of one model, "paced"
"""

from __future__ import annotations

import asyncio
import random
from typing import Annotated, Any, Final

import typer
import uvloop

from loadtests.completion_server import DONE, END, SSE, Completions, chunk, event
from shared.clock import monotonic

MODEL: Final = "paced"
EVERY_S: Final = 0.1
BURST_CHANCE: Final = 0.02
BURST: Final = 10  # events that a burst holds back, and then sends at once
USAGE: Final = {"prompt_tokens": 10, "completion_tokens": 0, "total_tokens": 10}


class Paced(Completions):
    def __init__(self, dice: random.Random) -> None:
        super().__init__(MODEL)
        self._dice = dice

    def asked(self, body: dict[str, Any]) -> None:
        seconds = body.get("seconds")
        if not isinstance(seconds, int | float):
            seconds = self._dice.uniform(20, 60)
        self._left = self._events = max(2, int(seconds / EVERY_S))
        self._usage = bool(body.get("stream_options"))
        self.transport.write(SSE)
        self._next(self._dice.uniform(0, EVERY_S), 1)

    def _next(self, after_s: float, many: int) -> None:
        self.timer = self.loop.call_later(after_s, self._say, many)

    def _say(self, many: int) -> None:
        many = min(many, self._left)
        self._left -= many
        blob = b"".join([self._event(self._left + many - n) for n in range(many)])
        if not self._left:
            usage = {**USAGE, "completion_tokens": self._events}
            if self._usage:
                blob += event({"model": MODEL, "choices": [], "usage": usage})
            blob += DONE
        self.transport.write(chunk(blob) + (b"" if self._left else END))
        if self._left:
            burst = self._dice.random() < BURST_CHANCE
            many = BURST if burst else 1
            self._next(EVERY_S * many * self._dice.uniform(0.8, 1.2), many)

    def _event(self, left: int) -> bytes:
        delta = {"content": f" word{left}"}
        finish = "length" if left == 1 else None
        return event(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion.chunk",
                "created": 1,
                "model": MODEL,
                "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
                "left": left - 1,
                "sent": monotonic(),
            }
        )


async def serve(port: int, seed: int) -> None:
    dice = random.Random(seed)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Paced(dice), "127.0.0.1", port, backlog=1024)
    port = server.sockets[0].getsockname()[1]
    print(f"paced server ready on http://127.0.0.1:{port}", flush=True)
    await server.serve_forever()


def main(
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the replies' lengths and pauses.")] = 1,
) -> None:
    uvloop.run(serve(port, seed))


if __name__ == "__main__":
    typer.run(main)
