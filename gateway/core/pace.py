"""How long a replica takes to its first token, and whether that is out of line with the others.

A frozen replica gives no times at all, so the requests that still wait count as well, with what
they have waited so far, once that is already too long. With m = the median of the medians of the
others that have `slow_samples` times in this window:

    too long = max(slow_factor * m, m + slow_s)
    slow     = of at least slow_samples requests more than half took, or wait, too long

Hence one long prompt is nobody's fault, and a fleet that is slow as a whole has no slow replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from gateway.core.breaker import HealthRules
from shared.ids import ReplicaId, RequestId

SAMPLES_MAX: Final = 64
"""Times kept of one window: the latest."""


class Pace:
    """One replica's times to first token in this window, and its requests that have none yet."""

    __slots__ = ("_count", "_times", "waiting")

    def __init__(self) -> None:
        self._times = [0.0] * SAMPLES_MAX
        self._count = 0
        self.waiting: dict[RequestId, float] = {}  # sent at

    def answered(self, request: RequestId, now: float) -> None:
        """Its first token came; harmless when that was known, or nobody waited for it."""
        sent_at = self.waiting.pop(request, None)
        if sent_at is not None:
            self._times[self._count % SAMPLES_MAX] = now - sent_at
            self._count += 1

    def times(self) -> Sequence[float]:
        return self._times[: min(self._count, SAMPLES_MAX)]

    def turn(self) -> None:
        """A new window; those that wait still do."""
        self._count = 0


def slow(paces: Mapping[ReplicaId, Pace], now: float, rules: HealthRules) -> list[ReplicaId]:
    """Those that are out of line, the slowest first."""
    times = {replica: pace.times() for replica, pace in paces.items()}
    medians = {r: median(t) for r, t in times.items() if len(t) >= rules.slow_samples}
    found = []
    for replica, pace in paces.items():
        others = [m for r, m in medians.items() if r != replica]
        if others:
            usual = median(others)
            limit_s = max(rules.slow_factor * usual, usual + rules.slow_s)
            waited = (now - sent_at for sent_at in pace.waiting.values())
            share = _share_above(limit_s, times[replica], waited, rules.slow_samples)
            if share > 0.5:
                found.append((-share, replica))
    return [replica for _, replica in sorted(found)]


def _share_above(
    limit_s: float, times: Sequence[float], waited: Iterable[float], least: int
) -> float:
    above = sum(time > limit_s for time in times)
    held = sum(time > limit_s for time in waited)
    total = len(times) + held
    return (above + held) / total if total >= least else 0.0
