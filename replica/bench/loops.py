"""Loops over the engine's own API: scheduler and runner in one process, without HTTP.

Closed: `concurrency` requests are in flight, the first of them submitted at once; each that ends is
replaced until all have run. Open: each is submitted at its own moment, however many are in flight.
Steps go through the replica's own pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

from replica.core.scheduler import Scheduler
from replica.core.sequence import Finish
from replica.core.sequence import Sequence as Request
from replica.engine.flight import StepRunner
from replica.pipeline import Pipeline, Turn

_IDLE_S = 0.0005


class Mover(Protocol):
    """Who moves adapters."""

    def begin(self) -> None:
        """Have loads begin that are wished."""

    def arriving(self) -> bool:
        """Say what has arrived; whether more is on its way."""


@dataclass(slots=True)
class Measured:
    wall_s: float = 0.0
    tokens: int = 0
    first_s: dict[str, float] = field(default_factory=dict)  # to the first token, by request
    missed: set[str] = field(default_factory=set)  # whose adapter was not in a slot as they came
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, rows, tokens
    host_s: list[float] = field(default_factory=list)  # of a step's planning, launch and settling
    gaps: list[float] = field(default_factory=list)  # between tokens of one request
    texts: dict[str, list[int]] = field(default_factory=dict)


class Loop:
    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: StepRunner,
        mover: Mover,
        is_resident: Callable[[Request], bool],
        requests: Sequence[Request],
        concurrency: int,
        arrivals_s: Sequence[float] | None = None,
    ) -> None:
        """`arrivals_s` after the start makes an open loop."""
        self._scheduler, self._mover, self._is_resident = scheduler, mover, is_resident
        self._requests, self._concurrency = requests, concurrency
        self._arrivals_s = None if arrivals_s is None else list(reversed(arrivals_s))
        self._waiting = list(reversed(requests))
        self._sent: dict[str, float] = {}
        self._told: dict[str, float] = {}
        self._began = 0.0
        self._pipeline = Pipeline(
            scheduler=scheduler, runner=runner, clock=perf_counter,
            meanwhile=self._meanwhile, arriving=mover.arriving,
        )  # fmt: skip
        self.measured = Measured()

    def run(self) -> Measured:
        measured, left = self.measured, len(self._requests)
        self._began = before = perf_counter()
        while left:
            now = perf_counter()
            self._submit(now)
            self._mover.arriving()
            turn = self._pipeline.turn()
            then = perf_counter()
            if turn.landed is not None:
                rows = len(turn.landed.rows)
                measured.steps.append((then - before, rows, turn.landed.total_tokens))
            elif turn.started is None:
                time.sleep(_IDLE_S)
            before = then
            left -= self._tell(turn, then)
            measured.host_s.append(perf_counter() - now - turn.waited)
        measured.wall_s = perf_counter() - self._began
        measured.texts = {request.id: list(request.output) for request in self._requests}
        return measured

    def _meanwhile(self, seconds: float) -> None:
        time.sleep(seconds)
        if self._arrivals_s is not None:
            self._submit(perf_counter())

    def _submit(self, now: float) -> None:
        while self._waiting and self._is_due(now):
            request = self._waiting.pop()
            self._sent[request.id] = now
            if self._arrivals_s is not None:
                self._sent[request.id] = self._began + self._arrivals_s.pop()
            if not self._is_resident(request):
                self.measured.missed.add(request.id)
            self._scheduler.add(request, now)
            self._mover.begin()

    def _is_due(self, now: float) -> bool:
        if self._arrivals_s is None:
            return len(self._sent) < self._concurrency
        return self._began + self._arrivals_s[-1] <= now

    def _tell(self, turn: Turn, then: float) -> int:
        """How many have ended."""
        measured, ended = self.measured, 0
        for item in turn.progress:
            if item.token is not None:
                measured.tokens += 1
                if item.seq in self._told:
                    measured.gaps.append(then - self._told[item.seq])
                else:
                    measured.first_s[item.seq] = then - self._sent[item.seq]
                self._told[item.seq] = then
            if item.finish is not None:
                assert item.finish is not Finish.ERROR, item.reason
                ended += 1
                del self._sent[item.seq]
                self._told.pop(item.seq, None)
        return ended
