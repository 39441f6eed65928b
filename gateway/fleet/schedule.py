"""Adapters that are known to be wanted at some time of day, told to placement a day ahead.

The core counts in monotonic seconds; here hours of the day become them. Told anew every hour, so
that a clock that was set is followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import time
from typing import Final

from gateway.config import ScheduledAdapters
from gateway.core.popularity import Expected
from gateway.fleet.pump import Pump
from shared.clock import Clock, wall
from shared.ids import AdapterId

_DAY_S: Final = 86_400.0
_TOLD_EVERY_S: Final = 3600.0


class Schedule:
    def __init__(
        self, entries: Sequence[ScheduledAdapters], pump: Pump, *, clock: Clock = wall
    ) -> None:
        self._entries = entries
        self._pump = pump
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            dispatcher, now = self._pump.dispatcher, self._pump.clock()
            dispatcher.expect(list(expected(self._entries, self._clock(), now)))
            await asyncio.sleep(_TOLD_EVERY_S)


def expected(entries: Sequence[ScheduledAdapters], wall_s: float, now: float) -> Iterator[Expected]:
    """The windows of yesterday, today and tomorrow that have not ended, on the core's clock."""
    midnight = wall_s - wall_s % _DAY_S
    for entry in entries:
        start, end = _seconds(entry.start), _seconds(entry.end)
        length = (end - start) % _DAY_S or _DAY_S
        for day in (-1, 0, 1):
            starts_at = now + midnight + day * _DAY_S + start - wall_s
            if starts_at + length > now:
                for adapter in entry.adapters:
                    name = AdapterId(adapter)
                    yield Expected(name, entry.rate_per_s, starts_at, starts_at + length)


def _seconds(at: time) -> float:
    return at.hour * 3600.0 + at.minute * 60.0 + at.second
