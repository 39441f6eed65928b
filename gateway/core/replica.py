"""One replica as the fleet sees it: its state, its places, what of ours runs there."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from gateway.core.breaker import Breaker
from gateway.core.pace import Pace
from gateway.core.reserve import NONE, reserved
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import ReplicaReport

RAMP_STEPS: Final = 16
"""Slow start grants a place more in so many steps: each is a wake-up."""

_RAMP_BEGIN: Final = 0.1


class ReplicaState(StrEnum):
    UNKNOWN = "unknown"
    UP = "up"
    SUSPECT = "suspect"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    DRAINING = "draining"
    LOST = "lost"


class Conduct(StrEnum):
    """How a replica behaved on one request. None is used where that is not known."""

    WELL = "well"  # it answered, whatever it said
    BUSY = "busy"  # it refused for its load, which says nothing of its health
    FAULTY = "faulty"  # an answer that is none, an error of its own, or none in time
    GONE = "gone"  # no connection, or it broke: suspect at once


@dataclass(slots=True)
class InUse:
    """Our requests for one adapter on one replica."""

    requests: int
    since: float


@dataclass(slots=True, eq=False)
class Replica:
    """Written by Fleet alone; others read."""

    id: ReplicaId
    service_s: float
    state: ReplicaState = ReplicaState.UNKNOWN
    serving: bool = False  # UP or HALF_OPEN: requests may go there
    said: ReplicaReport | None = None
    heard_at: float = 0.0  # when added, then of the last report
    look_until: float | None = None  # silent too long; its report may lie unread until then
    drained: bool = False  # by an operator of this gateway
    in_flight: int = 0
    load: int = 0
    capacity: int = 0
    limit: int = 0
    common: int = 0  # of these, places that anyone may have
    reserve_share: float = 0.0  # of its capacity, kept back beyond them
    kept_from: float = NONE  # the strongest claim that waits for a common place
    slots: int = 0
    ours: dict[AdapterId, InUse] = field(default_factory=dict)
    held: frozenset[AdapterId] = frozenset()  # reported: pinned, or sequences run with them
    full_since: float | None = None  # it was full when this end of a request was seen
    breaker: Breaker = field(default_factory=Breaker)
    pace: Pace = field(default_factory=Pace)
    ramp_from: float | None = None  # in slow start since
    share: float = 1.0  # of its places, below 1 in slow start
    leaving_by: float | None = None  # to be drained when others have what it has, or then
    slots_used: int = 0  # reported: adapters in a slot, or on their way to one
    counted: tuple[int, int] = (0, 0)  # its load and capacity, in the sums of its pool
    heap_key: float | None = None  # how busy the pool's heap thinks it is; never too busy

    @property
    def open(self) -> bool:
        return self.serving and self.load < self.limit

    @property
    def roomy(self) -> bool:
        """It has a place for anyone."""
        return self.serving and self.load < self.common

    def places(self, claim: float) -> int:
        """How many there are for one with this claim to the last ones."""
        return self.limit if claim < self.kept_from else self.common

    @property
    def busy(self) -> float:
        """Load for its capacity."""
        return self.load / self.capacity if self.capacity else float(self.load)

    @property
    def draining(self) -> bool:
        return self.drained or (self.said is not None and self.said.draining)

    def slots_short(self) -> int:
        """Slots too few for one adapter more, beside those that no load can have now: pinned, or of
        adapters that run or are about to."""
        if len(self.held) + len(self.ours) < self.slots:
            return 0
        return max(0, len(self.held | self.ours.keys()) + 1 - self.slots)

    def settle_limit(self) -> None:
        """The places it has: a little above its capacity, fewer in slow start, one for a trial.

        Those beyond its capacity are for no one in particular, so a reserve is kept back below it.
        """
        whole = self.capacity + max(1, self.capacity // 8) if self.capacity else 0
        if self.breaker.half_open:
            self.limit = whole if self.breaker.trial is None else 0
        elif self.share < 1 and whole:
            self.limit = max(1, int(whole * self.share))
        else:
            self.limit = whole
        kept = reserved(self.reserve_share, self.capacity)
        self.common = (
            max(min(1, self.limit), min(self.limit, self.capacity) - kept) if kept else self.limit
        )

    def ramp(self, now: float, slow_start_s: float) -> float:
        """Its share by now; when that is to grow next (infinite once it is whole)."""
        assert self.ramp_from is not None
        step = int(RAMP_STEPS * (now - self.ramp_from) / slow_start_s + 1e-9)
        if step >= RAMP_STEPS:
            self.ramp_from, self.share = None, 1.0
            return float("inf")
        self.share = _RAMP_BEGIN + (1 - _RAMP_BEGIN) * max(0, step) / RAMP_STEPS
        return self.ramp_from + (step + 1) * slow_start_s / RAMP_STEPS

    def check(self, leases: set[RequestId]) -> None:
        assert self.in_flight == len(leases), f"{self.id}: leases and count differ"
        assert 0 <= self.in_flight <= self.load, f"{self.id}: {self.in_flight} of {self.load}"
        assert sum(use.requests for use in self.ours.values()) <= self.in_flight
        assert all(use.requests > 0 for use in self.ours.values())
        assert self.pace.waiting.keys() <= leases, f"{self.id}: waits for what is not there"
        assert self.serving == (self.state in (ReplicaState.UP, ReplicaState.HALF_OPEN))
        assert self.breaker.trial is None or self.breaker.trial in leases
        self.breaker.check()
