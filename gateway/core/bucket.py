"""A token bucket: in any window of t seconds it grants at most `burst + rate_per_s * t`.

    level(now) = min(burst, level + rate_per_s * (now - at))

`take` grants when the whole cost is there and then takes it, else it takes nothing. What a request
really cost is known afterwards: `settle(delta)` charges the difference, and may leave the level
below zero: a debt, which the next requests wait for. It never lifts the level above `burst`. A
clock that steps back adds nothing. Unit: quota tokens (or requests), and seconds.

Only a grant or a settlement writes; a denied request and a look leave the bucket as it was, so that
`retry_after_s` is exact: who comes back that much later, nobody else having taken, is granted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Granted:
    level: float  # what is left


@dataclass(frozen=True, slots=True)
class Denied:
    retry_after_s: float  # infinite when the cost is above the burst: no waiting helps


class TokenBucket:
    __slots__ = ("_at", "_level", "burst", "rate_per_s")

    def __init__(self, *, rate_per_s: float, burst: float, now: float) -> None:
        """Starts full. A rate of zero never refills."""
        if not (rate_per_s >= 0 and burst > 0 and math.isfinite(rate_per_s + burst)):
            raise ValueError(f"rate_per_s >= 0 and burst > 0, not {rate_per_s} and {burst}")
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._level = burst
        self._at = now

    def level(self, now: float) -> float:
        """Negative while in debt."""
        return min(self.burst, self._level + self.rate_per_s * max(0.0, now - self._at))

    def take(self, cost: float, now: float) -> Granted | Denied:
        """All of `cost` or nothing."""
        if cost < 0:
            raise ValueError(f"a cost is not negative: {cost}; settle() gives back")
        level = self.level(now)
        if level < cost:
            return Denied(self._wait(cost, level, now))
        self._write(level - cost, now)
        return Granted(self._level)

    def settle(self, delta: float, now: float) -> None:
        """Charge `delta` = actual - estimate of a granted request; negative gives back."""
        self._write(min(self.burst, self.level(now) - delta), now)

    def check(self) -> None:
        assert self._level <= self.burst, f"level {self._level} above burst {self.burst}"
        assert math.isfinite(self._level), f"level {self._level}"

    def _write(self, level: float, now: float) -> None:
        self._level = level
        self._at = max(self._at, now)

    def _wait(self, cost: float, level: float, now: float) -> float:
        """Seconds until `cost` is there, rounded up until the arithmetic of `level` agrees."""
        if cost > self.burst or self.rate_per_s == 0:
            return math.inf
        wait = (cost - level) / self.rate_per_s + max(0.0, self._at - now)
        slack = 1e-9
        while self.level(now + wait) < cost:
            wait += slack
            slack *= 2
        return wait
