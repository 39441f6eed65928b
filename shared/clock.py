"""Time as a value: cores take `now`; shells read it from one of these."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

Clock = Callable[[], float]
"""Seconds; only differences mean anything."""

monotonic: Final[Clock] = time.monotonic

wall: Final[Clock] = time.time
"""Seconds since the epoch: for records that people read, never for measuring a wait."""


class ManualClock:
    """A clock that moves when told to; it never steps back."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"a clock does not step back: {seconds}")
        self._now += seconds
        return self._now
