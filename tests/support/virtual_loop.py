"""An asyncio loop whose clock jumps to the next timer: hours pass in a moment, in a fixed order.

Timers of one moment run in the order in which they were set. Nothing may wait for a socket: with
no timer left and nobody ready, the loop says so instead of sleeping for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
from collections.abc import Callable
from contextvars import Context
from typing import Any


class _Timer(asyncio.TimerHandle):
    born = 0

    def __lt__(self, other: object) -> bool:
        assert isinstance(other, _Timer)
        return (self.when(), self.born) < (other.when(), other.born)


class _Jump(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits, and no timer is set")
        if timeout > 0:
            self.loop.jump()
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _Jump()
        selector.loop = self
        self._now = 0.0
        self._timers = 0
        super().__init__(selector)
        self._clock_resolution = math.ulp(self._now)

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        self._clock_resolution = math.ulp(self._now)  # a timer a hair later is not of this moment

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        self._timers += 1
        timer.born = self._timers
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)
