"""The load: so many connections, each asking anew as soon as it is answered, for so long."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal, cast

import orjson

Kind = Literal["json", "sse", "paced"]

ADAPTERS: Final = 500
_ZIPF: Final = 1.1
_TEXT: Final = "lorem ipsum dolor " * 43
_REQUESTS: Final = 512


@dataclass
class Count:
    replies: int = 0
    events: int = 0
    failed: int = 0
    seen: list[bytes] = field(default_factory=list)  # the first failures, for people


def requests(kind: Kind, key: str, seed: int = 1) -> list[bytes]:
    """The same for every proxy: 1 KB bodies, adapters drawn by Zipf's law."""
    dice = random.Random(seed)
    weights = list(accumulate((rank + 1) ** -_ZIPF for rank in range(ADAPTERS)))
    made = []
    for rank in dice.choices(range(ADAPTERS), cum_weights=weights, k=_REQUESTS):
        body = orjson.dumps(
            {
                "model": f"adapter-{rank}",
                "messages": [{"role": "user", "content": _TEXT}],
                "max_tokens": 64,
                "stream": kind != "json",
                "paced": kind == "paced",
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


class Asker(asyncio.Protocol):
    """One connection. The end of a reply is looked for in its last bytes: nothing is parsed."""

    def __init__(self, wires: list[bytes], count: Count, dice: random.Random) -> None:
        self._wires, self._count, self._dice = wires, count, dice
        self._transport: asyncio.Transport
        self._reply = self._tail = b""
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._count.events += data.count(b"data: {")
        self._reply += data if len(self._reply) < 4096 else b""
        self._tail = (self._tail + data)[-16:]
        if not self._ends():
            return
        if self._reply.startswith(b"HTTP/1.1 200"):
            self._count.replies += 1
        else:
            self._count.failed += 1
            self._count.seen = [*self._count.seen[:3], self._reply[:400]]
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    def _ask(self) -> None:
        self._reply = self._tail = b""
        self._transport.write(self._dice.choice(self._wires))

    def _ends(self) -> bool:
        if self._tail.endswith(b"0\r\n\r\n"):
            return True
        head, end, body = self._reply.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length: ")
        return bool(end) and at >= 0 and len(body) >= int(head[at + 16 :].split(b"\r\n")[0])

    def stop(self) -> None:
        self._transport.abort()


async def run(
    url: tuple[str, int], wires: list[bytes], *, connections: int, seconds: float
) -> Count:
    loop, count, dice = asyncio.get_running_loop(), Count(), random.Random(1)
    askers = [
        (await loop.create_connection(lambda: Asker(wires, count, dice), *url))[1]
        for _ in range(connections)
    ]
    await asyncio.sleep(seconds)
    for asker in askers:
        asker.stop()
    await asyncio.gather(*[asker.gone for asker in askers])
    return count
