"""The floor: a proxy that does nothing but pass bytes, `python -m loadtests.bench.splice URL…`.

Two parsers and a pool, on the same loop and interpreter as the gateway: what a request and a chunk
cost in any Python proxy. What the gateway costs beyond that is the price of its features.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop


class Back(asyncio.Protocol):
    """A connection to a server, lent to one client at a time."""

    def __init__(self, pool: list[Back]) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._client: Client | None = None
        self._whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, client: Client, request: bytes) -> None:
        self._client, self._whole = client, False
        self.transport.write(request)

    def on_message_complete(self) -> None:
        self._whole = True

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._client is None or self._client.transport.is_closing():
            return self.transport.abort()
        self._client.transport.write(data)
        if self._whole:
            self._client = None
            self._pool.append(self)


class Client(asyncio.Protocol):
    """A connection of a client that asks one thing at a time."""

    def __init__(self, addresses: list[tuple[str, int]], pools: list[list[Back]]) -> None:
        self._addresses, self._pools = addresses, pools
        self._parser = httptools.HttpRequestParser(self)
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def on_message_begin(self) -> None:
        self._headers: list[bytes] = []
        self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append(b"%b: %b\r\n" % (name, value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        number = zlib.crc32(orjson.loads(self._body)["model"].encode()) % len(self._pools)
        head = b"POST %b HTTP/1.1\r\n%b\r\n" % (self._url, b"".join(self._headers))
        pool = self._pools[number]
        if pool:
            pool.pop().ask(self, head + self._body)
        else:
            task = asyncio.get_running_loop().create_task(self._dial(number, head + self._body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    async def _dial(self, number: int, request: bytes) -> None:
        pool, loop = self._pools[number], asyncio.get_running_loop()
        _, back = await loop.create_connection(lambda: Back(pool), *self._addresses[number])
        back.ask(self, request)


async def serve(urls: list[str]) -> None:
    parts = [urlsplit(url) for url in urls]
    addresses = [(part.hostname or "", part.port or 80) for part in parts]
    pools: list[list[Back]] = [[] for _ in addresses]
    server = await asyncio.get_running_loop().create_server(
        lambda: Client(addresses, pools), "127.0.0.1", 0, backlog=1024
    )
    print(f"ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
