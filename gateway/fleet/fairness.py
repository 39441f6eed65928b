"""How even the service of those is who wait, measured every few seconds.

The gap that the fair queue bounds (`fairness_gap`) is of one instant; this is what came of it: of
all tenants that waited through the whole of the last `WINDOW_S`, Jain's index of what each was
given for its weight. Those that did not wait all the time had what they asked for, and say nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.core.dispatcher import Dispatcher

WINDOW_S: Final = 5.0


class Fairness:
    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.jain = 1.0
        """Of the last window; 1 when fewer than two waited through it."""

    async def run(self) -> None:
        while True:
            self.jain = self._dispatcher.fairness()
            await asyncio.sleep(WINDOW_S)
