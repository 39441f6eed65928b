"""The store as the gateway sees it: atomic scripts on the hot path, plain reads beside it.

Two roads to one server. `script` runs over a `Wire` that every request shares and is bounded by
`timeout_s`; once it fails the breaker is open, and until a probe in the background has dialled
anew and had an answer in time, `script` raises StoreAway at once, which costs nothing. `change`
and the reads take redis-py's pool with seconds of patience: they serve people and background
tasks, and a large reply there never stands before a quota decision.

Every key gets the fleet's prefix here. To run on a Redis Cluster the prefix needs a hash tag
(`{loraplex}:`), since some scripts touch several keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.store.patience import PATIENCE_S, patient, translated
from gateway.store.wire import Answered, StoreAway, StoreError, Wire, Word
from shared import tasks

__all__ = ["Store", "StoreAway", "StoreError", "Word"]

_log = logging.getLogger(__name__)

_DIAL_S: Final = 2.0
_REDIAL_MIN_S: Final = 0.05
_REDIAL_MAX_S: Final = 1.0
_STEADY_S: Final = 5.0  # a wire that lived this long earns a quick redial
_POOL_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class _Script:
    text: str
    sha: str


class Store:
    """`start` returns though the server is away; `away` and `reason` say so."""

    def __init__(self, url: str, *, prefix: str = "loraplex:", timeout_s: float = 0.05) -> None:
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._scripts = {path.stem: _read(path) for path in Path(__file__).parent.glob("*.lua")}
        # decode_responses: names are UTF-8 by the registry's validation
        self._pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_POOL_MAX,
            timeout=PATIENCE_S,
            # Bounded by `patient` instead: redis-py would use asyncio.wait_for, and before Python
            # 3.12 that swallows a cancellation that comes at the wrong moment.
            socket_timeout=None,
            socket_connect_timeout=_DIAL_S,
            retry=Retry(NoBackoff(), 0),
            decode_responses=True,
        )
        self._client = Redis(connection_pool=self._pool)
        self._wire: Wire | None = None
        self._up = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self.reason = "the store was not dialled yet"

    @property
    def away(self) -> bool:
        """The breaker is open: `script` fails at once."""
        return self._wire is None or self._wire.lost

    async def start(self) -> None:
        """Begin to keep a wire up; wait for it a moment, and no longer."""
        self._keeper = tasks.spawn(self._keep(), name="store")
        await self.back(timeout_s=_DIAL_S)

    async def close(self) -> None:
        if self._keeper is not None:
            await tasks.stop(self._keeper)
        if self._wire is not None:
            self._wire.lose("the store was closed")
        self._up.clear()
        await self._client.aclose()
        await self._pool.aclose()

    async def back(self, *, timeout_s: float | None = None) -> bool:
        """Wait until the breaker is closed; False when that took longer than `timeout_s`."""
        if self.away:  # the keeper may not have had its turn yet
            self._up.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        except TimeoutError:
            return False
        return True

    # the hot path

    async def script(self, name: str, keys: Sequence[str], args: Sequence[Word]) -> Any:
        """Run `name.lua` within `timeout_s`; strings in the reply are bytes."""
        try:
            return await self._call("EVALSHA", self._scripts[name].sha, keys, args)
        except StoreError as error:
            if not _is_forgotten(error):
                raise
        return await self._call("EVAL", self._scripts[name].text, keys, args)

    def ask(self, name: str, keys: Sequence[str], args: Sequence[Word], answered: Answered) -> None:
        """`script` without a coroutine: `answered` gets the reply, or the StoreAway, at once or
        in the read that brings it. Nothing else of this turn is waited for."""
        script = self._scripts[name]
        rest = (len(keys), *[self._prefix + key for key in keys], *args)

        def again(reply: Any) -> None:
            if _is_forgotten(reply):
                self._ask(("EVAL", script.text, *rest), answered)
            else:
                answered(reply)

        self._ask(("EVALSHA", script.sha, *rest), again)

    def _ask(self, words: Sequence[Word], answered: Answered) -> None:
        wire = self._wire
        try:
            if wire is None:
                raise StoreAway(self.reason)
            wire.ask(words, answered)
        except StoreAway as error:
            answered(error)
        else:
            wire.flush()

    async def scripts(
        self, name: str, calls: Sequence[tuple[Sequence[str], Sequence[Word]]]
    ) -> list[Any]:
        """`script` for many calls in one write; raises the first failure once all have ended."""
        sha = self._scripts[name].sha
        answers = await asyncio.gather(
            *[self._call("EVALSHA", sha, keys, args) for keys, args in calls],
            return_exceptions=True,
        )
        for n, answer in enumerate(answers):
            if _is_forgotten(answer):
                answers[n] = await self.script(name, *calls[n])
            elif isinstance(answer, BaseException):
                raise answer
        return answers

    def _call(
        self, command: str, script: str, keys: Sequence[str], args: Sequence[Word]
    ) -> asyncio.Future[Any]:
        wire = self._wire
        if wire is None or wire.lost:
            raise StoreAway(self.reason)
        prefix = self._prefix
        return wire.call(command, script, len(keys), *[prefix + key for key in keys], *args)

    # the patient road

    async def change(self, name: str, keys: Sequence[str], args: Sequence[Word]) -> Any:
        """Run `name.lua` with patience; strings in the reply are str."""
        words: list[Any] = [*[self._prefix + key for key in keys], *args]
        async with patient():
            reply: Any = await self._client.eval(self._scripts[name].text, len(keys), *words)
            return reply

    async def number(self, key: str) -> int:
        """The integer at `key`, 0 when there is none."""
        async with patient():
            return int(await self._client.get(self._prefix + key) or 0)

    async def hashes(self, keys: Sequence[str]) -> list[dict[str, str]]:
        """The whole hash at each key, empty where there is none; read one after the other."""
        async with patient():
            pipeline = self._client.pipeline(transaction=False)
            for key in keys:
                pipeline.hgetall(self._prefix + key)
            found: list[dict[str, str]] = await pipeline.execute()
            return found

    async def entries(
        self, stream: str, *, after: str = "", most: int, newest: bool = False
    ) -> list[tuple[str, dict[str, str]]]:
        """Entries of a stream with their ids, `after` one; oldest first, or newest first."""
        key, begin = self._prefix + stream, f"({after}" if after else "-"
        async with patient():
            if newest:
                found: Any = await self._client.xrevrange(key, "+", begin, count=most)
            else:
                found = await self._client.xrange(key, begin, "+", count=most)
            return list(found)

    async def trim(self, stream: str, through: str) -> int:
        """Drop the entries up to this id; how many."""
        at, _, number = through.partition("-")
        async with patient():
            after = f"{at}-{int(number) + 1}"
            done: int = await self._client.xtrim(
                self._prefix + stream, minid=after, approximate=False
            )
            return done

    async def listen(self, channel: str) -> AsyncIterator[str]:
        """Messages published on `channel` from now on; "" first, once subscribed.

        What was published before that is not told: read the state then. Raises StoreAway when
        the connection breaks. A message can be lost without a word: poll as well, slowly.
        """
        with translated():
            async with self._client.pubsub() as subscription:
                await subscription.subscribe(self._prefix + channel)
                async for message in subscription.listen():
                    yield message["data"] if message["type"] == "message" else ""

    # the keeper: dial, hold, dial again

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _REDIAL_MIN_S
        told = False
        while True:
            began = loop.time()
            try:
                async with asyncio.timeout(_DIAL_S):
                    wire = await self._dial()
            except (OSError, StoreAway, TimeoutError) as error:  # TimeoutError has no text
                self.reason = f"the store cannot be reached: {error or 'no answer to the dial'}"
                if not told:
                    _log.warning("store away", extra={"reason": self.reason})
                    told = True
            else:
                self._wire, told = wire, False
                self._up.set()
                _log.info("store connected")
                self.reason = await asyncio.shield(wire.closed)
                self._up.clear()
                _log.warning("store lost", extra={"reason": self.reason})
            if loop.time() - began > _STEADY_S:
                pause_s = _REDIAL_MIN_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _REDIAL_MAX_S)

    async def _dial(self) -> Wire:
        """A wire that is authenticated, knows the scripts, and just answered in time."""
        wire = await self._connect()
        try:
            options = self._pool.connection_kwargs
            if password := options.get("password"):
                user = options.get("username")
                await wire.call("AUTH", *([user] if user else []), password)
            if database := options.get("db"):
                await wire.call("SELECT", database)
            for name, script in self._scripts.items():
                try:
                    await wire.call("SCRIPT", "LOAD", script.text)
                except StoreError as error:
                    raise StoreAway(f"the store does not run {name}.lua: {error}") from error
            await wire.call("PING")
        except BaseException:
            wire.lose("the dial was given up")
            raise
        return wire

    async def _connect(self) -> Wire:
        loop = asyncio.get_running_loop()
        options, kind = self._pool.connection_kwargs, self._pool.connection_class

        def make() -> Wire:
            return Wire(timeout_s=self._timeout_s)

        if issubclass(kind, UnixDomainSocketConnection):
            _, wire = await loop.create_unix_connection(make, options.get("path", ""))
            return wire
        tls = (
            SSLConnection(**options).ssl_context.get() if issubclass(kind, SSLConnection) else None
        )
        host, port = options.get("host", "localhost"), int(options.get("port", 6379))
        _, wire = await loop.create_connection(make, host, port, ssl=tls)
        return wire


def _is_forgotten(answer: object) -> bool:
    """Refused before it ran: a restarted or failed-over server knows no scripts."""
    return isinstance(answer, StoreError) and str(answer).startswith("NOSCRIPT")


def _read(path: Path) -> _Script:
    text = path.read_text()
    return _Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
