"""How many requests may be sent on to another replica: a share of all, so that no storm begins.

A fleet that fails as a whole would otherwise get each request `attempts` times, just when it can
bear the least. Law, over the last `window_s` (in steps of a tenth):

    retries granted <= max(floor, share * requests seen)     at the moment of each grant

The floor lets a quiet gateway retry at all. Both calls are O(1) and allocate nothing.
"""

from __future__ import annotations

import math
from typing import Final

_STEPS: Final = 10


class RetryBudget:
    __slots__ = ("_floor", "_requests", "_retries", "_seen", "_share", "_spent", "_step", "_step_s")

    def __init__(self, *, share: float, floor: int, window_s: float) -> None:
        if not (share >= 0 and floor >= 0 and 0 < window_s < math.inf):
            raise ValueError(f"share, floor >= 0 and window_s > 0: {share}, {floor}, {window_s}")
        self._share = share
        self._floor = floor
        self._step_s = window_s / _STEPS
        self._step = 0
        self._requests, self._retries = [0] * _STEPS, [0] * _STEPS
        self._seen = self._spent = 0  # their sums

    def saw(self, now: float) -> None:
        """One more request, at its first attempt."""
        self._turn(now)
        self._requests[self._step % _STEPS] += 1
        self._seen += 1

    def take(self, now: float) -> bool:
        """One retry. False when the budget is spent: nothing is taken then."""
        self._turn(now)
        if self._spent + 1 > max(self._floor, self._share * self._seen):
            return False
        self._retries[self._step % _STEPS] += 1
        self._spent += 1
        return True

    def check(self) -> None:
        assert self._seen == sum(self._requests), "requests and their sum differ"
        assert self._spent == sum(self._retries), "retries and their sum differ"

    def _turn(self, now: float) -> None:
        """Forget the steps that have left the window. A clock that steps back turns nothing."""
        step = int(now / self._step_s)
        gone = step - self._step
        if gone <= 0:
            return
        for old in range(self._step + 1, self._step + 1 + min(gone, _STEPS)):
            at = old % _STEPS
            self._seen -= self._requests[at]
            self._spent -= self._retries[at]
            self._requests[at] = self._retries[at] = 0
        self._step = step
