"""Who of the fleet is out, and who is not yet wholly in.

A replica is ejected (gateway/core/breaker.py) for `failures` faulty ends in a row, or for being
slow beside the others (gateway/core/pace.py). Law: while one that could serve is out, at least half
of the replicas that have ever reported and are not drained stand, UP or merely suspect. When a loss
would break that, the ejected come back early, the one that was due first, first: a fleet in trouble
as a whole needs all it has.

Failures count only while it is UP or on trial, so that one reset of many connections is one.

A replica that is fresh (a new boot, or one that joined a running fleet) or readmitted is in slow
start: it has a tenth of its places at first and all after `slow_start_s`, unless no other replica
has all of its own: a fleet that starts as a whole starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.core.breaker import Breaker, HealthRules
from gateway.core.pace import slow
from gateway.core.replica import Conduct, Replica, ReplicaState
from shared.ids import ReplicaId, RequestId


class Standing(StrEnum):
    EJECTED = "ejected"
    HALF_OPEN = "half_open"
    READMITTED = "readmitted"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A replica's standing changed."""

    replica: ReplicaId
    standing: Standing
    why: str  # of its ejection, also when that is over
    until: float | None = None  # of an ejection


class Health:
    def __init__(
        self,
        replicas: Mapping[ReplicaId, Replica],
        rules: HealthRules,
        settle: Callable[[Replica], None],
    ) -> None:
        """`settle` is called when a replica's state or places may have changed."""
        self._replicas = replicas
        self._rules = rules
        self._settle = settle
        self._began_at: float | None = None  # of the first report of all
        self._judge_at = 0.0
        self.due = math.inf
        """When `advance` has something to do; never late."""
        self.news: list[Verdict] = []
        """Not yet heeded by the dispatcher."""

    # -- requests

    def began(self, mine: Replica, request: RequestId, now: float, *, streams: bool) -> None:
        if streams:
            mine.pace.waiting[request] = now
        if mine.breaker.half_open:
            mine.breaker.trial = request
            mine.settle_limit()

    def answered(self, mine: Replica, request: RequestId, now: float) -> None:
        """Its first token came: the trial is passed, if it was one."""
        mine.pace.answered(request, now)
        if mine.breaker.trial == request:
            self._readmit(mine, now)

    def ended(self, mine: Replica, request: RequestId, conduct: Conduct | None, now: float) -> None:
        breaker = mine.breaker
        mine.pace.waiting.pop(request, None)
        if breaker.trial == request:
            self._tried(mine, conduct, now)
        elif not breaker.out:
            if conduct is Conduct.WELL:
                breaker.failures = 0
            elif conduct in (Conduct.FAULTY, Conduct.GONE) and mine.state is ReplicaState.UP:
                breaker.failures += 1
                if breaker.failures >= self._rules.failures:
                    self._eject(mine, "failures", now)

    # -- life cycle

    def reported(self, mine: Replica, *, boot_before: str | None, now: float) -> None:
        """A report came (it is in `mine.said`); a new boot is a new life, and owes nothing."""
        assert mine.said is not None
        if self._began_at is None:
            self._began_at = now
        fresh = boot_before is None and now - self._began_at > self._rules.slow_start_s
        if boot_before is not None and boot_before != mine.said.boot:
            mine.breaker, fresh = Breaker(), True
            mine.pace.turn()
        if fresh:
            self._ramp(mine, now)

    def judge(self, now: float) -> None:
        """Compare the replicas once a window, and eject who is out of line."""
        if now < self._judge_at:
            return
        self._judge_at = now + self._rules.window_s
        up = {r: mine for r, mine in self._replicas.items() if mine.state is ReplicaState.UP}
        for replica in slow({r: mine.pace for r, mine in up.items()}, now, self._rules):
            self._eject(up[replica], "slow", now)
        for mine in self._replicas.values():
            mine.pace.turn()

    def advance(self, now: float) -> Sequence[ReplicaId]:
        """What time alone does: trials become due, slow starts give more. Who may have a place."""
        if now < self.due:
            return ()
        self.due, grown = math.inf, []
        for mine in self._replicas.values():
            if mine.breaker.ripen(now):
                self._settle(mine)
                self.news.append(Verdict(mine.id, Standing.HALF_OPEN, mine.breaker.why))
            elif mine.breaker.until is not None:
                self.due = min(self.due, mine.breaker.until)
            if mine.ramp_from is not None:
                self.due = min(self.due, mine.ramp(now, self._rules.slow_start_s))
                self._settle(mine)
                grown.append(mine.id)
        return grown

    def uphold(self, now: float) -> None:
        """The law of half the fleet, after a replica was lost, drained, removed or came back."""
        out = [mine for mine in self._replicas.values() if _kept_out(mine)]
        out.sort(key=lambda mine: (mine.breaker.until or 0.0, mine.id))
        for mine in out:
            if self._spare() >= 0:
                return
            self._readmit(mine, now)

    def check(self) -> None:
        if any(_kept_out(mine) for mine in self._replicas.values()):
            assert self._spare() >= 0, "more than half of the fleet is out"

    # -- inside

    def _tried(self, mine: Replica, conduct: Conduct | None, now: float) -> None:
        mine.breaker.trial = None
        if conduct is Conduct.WELL:
            self._readmit(mine, now)
        elif conduct in (Conduct.FAULTY, Conduct.GONE):
            self._eject(mine, mine.breaker.why, now)
        else:  # it told nothing: the next request is the trial
            mine.settle_limit()

    def _eject(self, mine: Replica, why: str, now: float) -> None:
        if not mine.breaker.out and self._spare() < 1:
            return
        until = mine.breaker.open(why, now, self._rules)
        mine.ramp_from, mine.share = None, 1.0
        mine.pace.turn()
        self.due = min(self.due, until)
        self.news.append(Verdict(mine.id, Standing.EJECTED, why, until))
        self._settle(mine)

    def _readmit(self, mine: Replica, now: float) -> None:
        mine.breaker.close(now, self._rules)
        self._ramp(mine, now)
        self.news.append(Verdict(mine.id, Standing.READMITTED, mine.breaker.why))
        self._settle(mine)

    def _ramp(self, mine: Replica, now: float) -> None:
        whole = any(
            other.state is ReplicaState.UP and other.share == 1
            for other in self._replicas.values()
            if other is not mine
        )
        if whole and self._rules.slow_start_s > 0:
            mine.ramp_from = now
            self.due = min(self.due, mine.ramp(now, self._rules.slow_start_s))
        else:
            mine.ramp_from, mine.share = None, 1.0

    def _spare(self) -> int:
        """How many of those that stand may go."""
        counted = [m for m in self._replicas.values() if m.said is not None and not m.draining]
        standing = sum(m.state in (ReplicaState.UP, ReplicaState.SUSPECT) for m in counted)
        return standing - math.ceil(len(counted) / 2)


def _kept_out(mine: Replica) -> bool:
    """It could serve, were it not ejected."""
    return mine.state in (ReplicaState.EJECTED, ReplicaState.HALF_OPEN)
