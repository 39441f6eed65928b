"""Pipeline: steps between scheduler and runner, one of them under way while the next is planned.

A turn plans a step and starts it, then lands the one before: so a device that works on its own is
never without work while this thread does its own. A runner that computes in `launch` gains nothing
by that, and its step lands in the same turn. When nothing can be started, what is under way lands.

While it waits for a step the thread is lent out: `meanwhile` takes in what comes, so that a load
begins when it is wished and not when the step ends. And while adapters are on their way the next
step is planned late, as late as the device still gets it in time (`StepTimes` says when that is):
who waits for such an adapter may then be in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from replica.core.scheduler import Scheduler
from replica.core.step import Progress, Step
from replica.engine.flight import Flight, StepRunner
from replica.engine.sampler import Drawn
from shared.clock import Clock

_LOOK_S: Final = 0.00025
"""Between two looks at what is under way."""

_LAUNCH_S: Final = 0.002
"""To plan a step and queue it."""

_SURE: Final = 0.9
"""Of the time that a step is expected to take, how much it takes at least."""


class Turn(NamedTuple):
    """What one turn has brought."""

    started: Step | None
    landed: Step | None
    drawn: Mapping[str, Drawn]  # by sequence, of the step that landed
    progress: list[Progress]  # of that step, and ends that no step brought
    seconds: float  # that the device had for the step that landed
    waited: float  # how long this thread had nothing else to do


class Pipeline:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: StepRunner,
        clock: Clock,
        meanwhile: Callable[[float], None] = time.sleep,
        arriving: Callable[[], bool] = lambda: False,
    ) -> None:
        """`meanwhile` takes so many seconds at most, and may add and abort sequences and begin
        loads. `arriving` has rows run whose adapters are there, and says whether more come."""
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._meanwhile = meanwhile
        self._arriving = arriving
        self._under_way: deque[tuple[Step, Flight, float]] = deque()
        self._landed_at = 0.0

    @property
    def busy(self) -> bool:
        """A step is under way: another turn lands it."""
        return bool(self._under_way)

    def turn(self) -> Turn:
        held = self._hold()
        now = self._clock()
        step = self._scheduler.plan(now)
        progress = self._scheduler.collect()
        if step is not None:
            self._under_way.append((step, self._runner.launch(step), now))
            self._scheduler.advance(step)
        overlap = step is not None and self._runner.overlaps
        if len(self._under_way) <= overlap:
            return Turn(step, None, {}, progress, 0.0, held)
        landed, flight, began = self._under_way.popleft()
        queued = self._clock()
        while not flight.landed():
            self._meanwhile(_LOOK_S)
        drawn = flight.collect()
        then = self._clock()
        tokens = {seq: each.token for seq, each in drawn.items() if each.token >= 0}
        progress += self._scheduler.settle(landed, tokens, then)
        seconds, self._landed_at = then - max(began, self._landed_at), then
        return Turn(step, landed, drawn, progress, seconds, held + then - queued)

    def _hold(self) -> float:
        """Wait for adapters while the device has work; how long."""
        if not self._under_way or not self._arriving():
            return 0.0
        step, flight, planned_at = self._under_way[-1]
        since = self._clock()
        over = max(planned_at, self._landed_at) + _SURE * self._scheduler.times.expected_s(step)
        while self._clock() < over - _LAUNCH_S and not flight.landed():
            self._meanwhile(_LOOK_S)
            if not self._arriving():
                break
        return self._clock() - since
