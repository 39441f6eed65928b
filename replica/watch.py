"""StoreWatch: the adapter folder, looked through every few seconds and when a request asks.

A folder that appears is served without a restart; one that goes is withdrawn. One look at a time,
whoever asked for it; `look` looks at most once a second, so that unknown names cost nothing. A load
call holds `alone`, so that no look that began before it overrides what it read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import Final

from replica.engine import adapter_store
from replica.errors import EngineFailed
from replica.roster import Offered, Refused
from shared.clock import Clock
from shared.ids import AdapterId

_log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class StoreWatch:
    """`scan` may block; it runs on `readers`. `tell` takes what the folder holds now."""

    def __init__(
        self,
        *,
        scan: Callable[[], Iterable[adapter_store.Found | adapter_store.Refused]],
        tell: Callable[[Mapping[AdapterId, Offered | Refused]], Awaitable[None]],
        readers: Executor,
        every_s: float,
        clock: Clock,
    ) -> None:
        self._scan = scan
        self._tell = tell
        self._readers = readers
        self._every_s = every_s
        self._clock = clock
        self._looks = 0
        self._looked_at = float("-inf")
        self.alone = asyncio.Lock()

    async def run(self) -> None:
        """Until cancelled, or the engine is gone."""
        with suppress(EngineFailed):
            while True:
                await asyncio.sleep(self._every_s)
                await self.refresh()

    async def refresh(self) -> None:
        """Look now; who waits for a look that began meanwhile is content with that one.

        A folder that cannot be read keeps what was known of it.
        """
        looks = self._looks
        async with self.alone:
            if self._looks > looks:
                return
            self._looks += 1
            self._looked_at = self._clock()
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._readers, self._scan)
            except OSError as error:
                _log.error("adapter folder not readable", extra={"reason": str(error)})
                return
            await self._tell(dict(map(_content, found)))

    async def look(self) -> None:
        """Look, unless that was done less than a second ago."""
        if self._clock() - self._looked_at >= LOOK_S:
            await self.refresh()


def _content(
    answer: adapter_store.Found | adapter_store.Refused,
) -> tuple[AdapterId, Offered | Refused]:
    if isinstance(answer, adapter_store.Found):
        size = answer.size_bytes, answer.pages
        return answer.adapter, Offered(answer.adapter, answer.digest, answer.rank, *size)
    return answer.adapter, Refused(answer.adapter, f"{answer.reason_code}: {answer.message}")
