"""The completions that run, so that a drain can wait for them, or end them."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol


class Cancellable(Protocol):
    def cancel(self) -> Any:
        """End it, if it has not ended; its client may be told."""


class Running:
    def __init__(self) -> None:
        self._ones: set[Cancellable] = set()
        self._quiet = asyncio.Event()
        self.draining = False
        """Nothing new is taken."""
        self.ending = False
        """What runs is ended by us, not by its client."""

    def add(self, one: Cancellable) -> None:
        self._ones.add(one)

    def remove(self, one: Cancellable) -> None:
        self._ones.discard(one)
        if self.draining and not self._ones:
            self._quiet.set()

    async def drained(self) -> None:
        """Take nothing new; return when nothing runs any more."""
        self.draining = True
        if self._ones:
            await self._quiet.wait()

    def end_all(self) -> None:
        """End what still runs, each with an error its client can read."""
        self.ending = True
        for one in list(self._ones):
            one.cancel()
