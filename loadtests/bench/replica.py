"""A fake OpenAI server that costs next to nothing: `python -m loadtests.bench.replica PORT…`.

A plain reply is 1 KB; a stream is 64 events, at once, or one every 10 ms when the body says
`"paced": true`. It knows the usual shape of a request only: head and body in one read.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final, cast

import orjson
import uvloop

EVENTS: Final = 64
"""Of one stream, `[DONE]` not counted."""

MODEL: Final = "base"
_EVERY_S: Final = 0.01
_USAGE: Final = {"prompt_tokens": 200, "completion_tokens": EVENTS, "total_tokens": 200 + EVENTS}


def _framed(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


def _event(left: int) -> bytes:
    choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": None if left else "stop"}
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [choice],
        "pad": "x" * 60,
    }
    data = b"data: %b\n\n" % orjson.dumps(value if left else {**value, "usage": _USAGE})
    return b"%x\r\n%b\r\n" % (len(data), data)


_MESSAGE: Final = {"role": "assistant", "content": "x" * 750}
_WHOLE: Final = _framed(
    b"application/json",
    orjson.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": MODEL,
            "choices": [{"index": 0, "message": _MESSAGE, "finish_reason": "stop"}],
            "usage": _USAGE,
        }
    ),
)
_LISTING: Final = _framed(
    b"application/json", orjson.dumps({"object": "list", "data": [{"id": MODEL}]})
)
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_STREAM: Final = [_event(left) for left in reversed(range(EVENTS))]
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Fake(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET"):
            self._transport.write(_LISTING)
        elif b'"stream":true' not in data:
            self._transport.write(_WHOLE)
        elif b'"paced":true' in data:
            self._transport.write(_HEAD)
            self._say(0)
        else:
            self._transport.write(b"".join((_HEAD, *_STREAM, _END)))

    def _say(self, number: int) -> None:
        if self._transport.is_closing():
            return
        if number == EVENTS:
            self._transport.write(_END)
        else:
            self._transport.write(_STREAM[number])
            self._loop.call_later(_EVERY_S, self._say, number + 1)


async def serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Fake, "127.0.0.1", port, backlog=1024) for port in ports]
    taken = [server.sockets[0].getsockname()[1] for server in servers]
    print("ready on", *[f"http://127.0.0.1:{port}" for port in taken], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
