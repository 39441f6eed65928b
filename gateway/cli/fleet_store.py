"""The store of a fleet that `up` runs: its own Valkey, as a part to be kept, or the user's."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from typing import Final
from urllib.parse import urlsplit

from gateway.cli.failure import Failure
from gateway.cli.home import Home
from gateway.cli.process import Died, end_of
from gateway.config import StoreConfig
from gateway.store.embedded import EmbeddedStoreFailed, Server, serving
from gateway.store.redis import Store

_REACH_S: Final = 5.0
_POLL_S: Final = 0.2
_AWAY: Final = "the store cannot be reached: "


class OwnStore:
    """Valkey on the data directory. It dies with the calling thread, so make it in the main one."""

    name = "Valkey"

    def __init__(self, home: Home, held: ExitStack) -> None:
        """Blocks until it answers; `held` ends it. Raises Failure."""
        try:
            self._server: Server = held.enter_context(serving(home.store))
        except EmbeddedStoreFailed as error:
            raise Failure(str(error)) from error
        self._log_from = 0

    @property
    def url(self) -> str:
        """The same over every start."""
        return self._server.url

    async def exited(self) -> int:
        """Wait for the end; the exit status, negative for a signal."""
        while (code := self._server.poll()) is None:  # noqa: ASYNC110 (its process is not the loop's)
            await asyncio.sleep(_POLL_S)
        return code

    async def start_again(self) -> None:
        """On the same socket and append-only file. Raises Died, and then it has ended."""
        self._log_from = self._server.log.stat().st_size
        try:
            self._server.spawn()
            await asyncio.to_thread(self._server.wait_ready)
        except (EmbeddedStoreFailed, OSError) as error:
            raise Died(str(error)) from error

    def tail(self) -> str:
        return end_of(self._server.log, self._log_from)


async def reach(store: StoreConfig) -> None:
    """Raises Failure, in one line, when the user's own store does not answer."""
    logging.getLogger("gateway.store").addHandler(logging.NullHandler())  # the Failure says it
    try:
        client = Store(store.url, prefix=store.prefix)
    except ValueError as error:  # not an address of a store
        raise _unreachable(store.url, str(error)) from error
    try:
        await client.start()
        if not await client.back(timeout_s=_REACH_S):
            raise _unreachable(store.url, client.reason.removeprefix(_AWAY))
    finally:
        await client.close()


def _unreachable(url: str, why: str) -> Failure:
    return Failure(
        f"the store at {_without_password(url)} (store.url) cannot be reached: "
        f"{' '.join(why.split()).rstrip('.')}. "
        "Start it, or remove store.url to let `up` start its own."
    )


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
