"""One replica's address and the keep-alive connections to it: a bounded pool, and nothing else.

Why our own client: aiohttp's costs more than every feature of this gateway together, and httpx ten
times that (bench/gateway). How many connections are busy is bounded by what the dispatcher puts
in flight; how many wait for reuse, and for how long, is bounded here.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.edge.connection import Connection
from gateway.edge.exchange import ConnectFailed, Ended, ReplyLost, Sink

IDLE_MAX: Final = 256  # connections kept for reuse
IDLE_S: Final = 30.0  # one idle for longer is not trusted: the peer may be about to close it


class Upstream:
    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a replica's url is http://HOST:PORT, not {url!r}")
        secure = parts.scheme == "https"
        self.host: Final = parts.netloc.rpartition("@")[2]
        self.prefix: Final = parts.path.rstrip("/")
        self._address = (parts.hostname, parts.port or (443 if secure else 80))
        self._ssl = ssl.create_default_context() if secure else None
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def exchange(
        self, request: bytes, sink: Sink, *, first_byte_s: float, idle_s: float
    ) -> None:
        """Write `request`, give the reply to `sink`, return when it is whole.

        A kept connection that turns out dead before any byte of a reply is no fault of the
        replica: the request goes out once more, on a fresh connection.
        """
        connection = self._reuse() or await self._connect()
        self._busy.add(connection)
        try:
            return await connection.run(request, sink, first_byte_s, idle_s)
        except ReplyLost as error:
            if not error.stale:
                raise
        connection = await self._connect()
        self._busy.add(connection)
        await connection.run(request, sink, first_byte_s, idle_s)

    def start(
        self, request: bytes, sink: Sink, *, first_byte_s: float, idle_s: float, ended: Ended
    ) -> Connection | None:
        """`exchange` without a task, on a kept connection; None when there is none.

        An error that is `stale` means: do it by `exchange`."""
        connection = self._reuse()
        if connection is not None:
            self._busy.add(connection)
            connection.start(request, sink, first_byte_s, idle_s, ended)
        return connection

    def abandon(self, quiet_s: float, why: str) -> None:
        """The replica is taken for lost: end every exchange that has been silent this long.

        One that still receives is left alone; the reports may have failed and not the replica.
        """
        for connection in [*self._idle]:
            connection.abort()
        for connection in [*self._busy]:
            if connection.silent_s() >= quiet_s:
                connection.fail(ReplyLost(why))

    @property
    def busy(self) -> int:
        """Exchanges that run."""
        return len(self._busy)

    def close(self) -> None:
        for connection in [*self._idle, *self._busy]:
            connection.fail(ReplyLost("the gateway is closing"))

    def idle(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if len(self._idle) < IDLE_MAX:
            self._idle.append(connection)
        else:
            connection.abort()

    def ended(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _reuse(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()  # the most recent: the others age out
            if not connection.closed and now - connection.last_at < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"ssl": self._ssl} if self._ssl else {}
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, loop), *self._address, **options
                )
        except TimeoutError as error:
            raise ConnectFailed(f"no connection in {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise ConnectFailed(f"no connection: {error.strerror or error}") from error
        return connection
