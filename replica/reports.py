"""When a replica speaks of itself: on change, not too often, and never silent for a heartbeat.

Law: at most one report each `interval_s`; at least one each `heartbeat_s` while `tick` is called
when `due` says; what changed is said within `interval_s`; `seq` grows by one a report. Two changes
do not wait for the interval: of what is servable (`urgent`), and of an adapter that is farther than
was last said, for requests are sent here because it was near.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shared.messages import ReplicaReport, Tier

_PAGE_STEPS = 16
"""Free pages move with every token; a report is due when they cross a sixteenth of the pool."""


class Reports:
    """Times are the caller's monotonic seconds. `draft` makes a snapshot whose `seq` is ignored."""

    def __init__(
        self,
        *,
        draft: Callable[[], ReplicaReport],
        publish: Callable[[ReplicaReport], None],
        interval_s: float,
        heartbeat_s: float,
    ) -> None:
        self._draft = draft
        self._publish = publish
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._said: ReplicaReport | None = None
        self._said_at = 0.0
        self._pending = False

    def tick(self, now: float, *, urgent: bool = False) -> None:
        """Publish if it is time to."""
        draft = self._draft()
        said = self._said
        if said is None:
            return self._say(draft, 0, now)
        self._pending = _notable(draft, said)
        if urgent or now >= self.due() or _fell(draft, said):
            self._say(draft, said.seq + 1, now)
        return None

    def due(self) -> float:
        """When `tick` will publish if nothing else happens."""
        wait = self._interval_s if self._pending else self._heartbeat_s
        return self._said_at + wait

    def _say(self, draft: ReplicaReport, seq: int, now: float) -> None:
        self._said, self._said_at, self._pending = replace(draft, seq=seq), now, False
        self._publish(self._said)


def _notable(new: ReplicaReport, old: ReplicaReport) -> bool:
    return (
        new.running != old.running
        or new.waiting != old.waiting
        or new.draining != old.draining
        or _coarse(new.pages_free, new) != _coarse(old.pages_free, old)
        or _coarse(new.pages_cached, new) != _coarse(old.pages_cached, old)
        or (new.adapters is not old.adapters and new.adapters != old.adapters)
    )


def _coarse(pages: int, report: ReplicaReport) -> int:
    return pages * _PAGE_STEPS // report.pages_total


def _fell(new: ReplicaReport, old: ReplicaReport) -> bool:
    """Something has left a slot or host memory."""
    if new.adapters is old.adapters:
        return False
    far = {state.adapter for state in new.adapters if state.tier is Tier.DISK}
    was_near = (state.adapter for state in old.adapters if state.tier is not Tier.DISK)
    return not far.isdisjoint(was_near)
