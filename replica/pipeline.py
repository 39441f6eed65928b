"""Pipeline: steps between scheduler and runner, one of them under way while the next is planned.

A turn plans a step and starts it, then lands the one before: so a device that works on its own is
never without work while this thread does its own. A runner that computes in `launch` gains nothing
by that, and its step lands in the same turn. When nothing can be started, what is under way lands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from replica.core.scheduler import Scheduler
from replica.core.step import Progress, Step
from replica.engine.flight import Flight, StepRunner
from replica.engine.sampler import Drawn
from shared.clock import Clock


class Turn(NamedTuple):
    """What one turn has brought."""

    started: Step | None
    landed: Step | None
    drawn: Mapping[str, Drawn]  # by sequence, of the step that landed
    progress: list[Progress]  # of that step, and ends that no step brought
    seconds: float  # that the device had for the step that landed
    waited: float  # of them, how many this thread had nothing else to do


class Pipeline:
    def __init__(self, *, scheduler: Scheduler, runner: StepRunner, clock: Clock) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._under_way: deque[tuple[Step, Flight, float]] = deque()
        self._landed_at = 0.0

    @property
    def busy(self) -> bool:
        """A step is under way: another turn lands it."""
        return bool(self._under_way)

    def turn(self) -> Turn:
        now = self._clock()
        step = self._scheduler.plan(now)
        progress = self._scheduler.collect()
        if step is not None:
            self._under_way.append((step, self._runner.launch(step), now))
            self._scheduler.advance(step)
        overlap = step is not None and self._runner.overlaps
        if len(self._under_way) <= overlap:
            return Turn(step, None, {}, progress, 0.0, 0.0)
        landed, flight, began = self._under_way.popleft()
        queued = self._clock()
        drawn = flight.collect()
        then = self._clock()
        tokens = {seq: each.token for seq, each in drawn.items() if each.token >= 0}
        progress += self._scheduler.settle(landed, tokens, then)
        seconds, self._landed_at = then - max(began, self._landed_at), then
        return Turn(step, landed, drawn, progress, seconds, then - queued)
