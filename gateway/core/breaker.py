"""One replica's breaker: out for a while when it misbehaves, one trial before it is in again.

    CLOSED --failures in a row, or too slow--> OPEN --its time--> HALF OPEN --trial well--> CLOSED
                                               ^                     |
                                               +----trial failed-----+

    time out = min(ejection_max_s, ejection_s * 2 ** (times it was out before))

The count of times starts over once it has been in for `ejection_max_s`. While half open exactly one
request at a time is its trial. One that passed is on probation: a single failure opens it again
until a request has ended well. The breaker knows nothing of the fleet: whether one more may be out
is `Fleet`'s to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from shared.ids import RequestId

_DOUBLINGS_MAX: Final = 30


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a replica is out, for how long, and how it comes back. Times in seconds."""

    failures: int = 5  # in a row
    ejection_s: float = 5.0  # the first time; twice as long each time after
    ejection_max_s: float = 60.0
    slow_factor: float = 5.0  # times to first token this many times the others' median...
    slow_s: float = 2.0  # ...and this much above it...
    slow_samples: int = 8  # ...of at least so many requests...
    window_s: float = 10.0  # ...in this time
    slow_start_s: float = 10.0  # a fresh or readmitted replica has all its places after this


@dataclass(slots=True)
class Breaker:
    failures: int = 0  # in a row, while closed
    until: float | None = None  # open until then
    half_open: bool = False
    trial: RequestId | None = None
    why: str = ""  # it opened last: "failures" or "slow"
    times: int = 0  # it was out, lately
    closed_at: float = -math.inf

    @property
    def out(self) -> bool:
        """Open or half open."""
        return self.until is not None or self.half_open

    def open(self, why: str, now: float, rules: HealthRules) -> float:
        """Until when it is out now."""
        if not self.out and now - self.closed_at >= rules.ejection_max_s:
            self.times = 0
        out_s = min(rules.ejection_max_s, rules.ejection_s * 2 ** min(self.times, _DOUBLINGS_MAX))
        self.times += 1
        self.half_open, self.trial, self.why = False, None, why
        self.until = now + out_s
        return self.until

    def ripen(self, now: float) -> bool:
        """Its time out is over, if it is: from now on trials."""
        if self.until is None or now < self.until:
            return False
        self.until, self.half_open = None, True
        return True

    def close(self, now: float, rules: HealthRules) -> None:
        """In again, on probation."""
        self.until, self.half_open, self.trial = None, False, None
        self.failures = rules.failures - 1
        self.closed_at = now

    def check(self) -> None:
        assert not (self.half_open and self.until is not None), "open and half open at once"
        assert self.trial is None or self.half_open, "a trial of a replica that is not half open"
