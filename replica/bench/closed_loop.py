"""A closed loop over the engine's own API: scheduler and runner in one process, without HTTP.

`concurrency` requests are in flight, the first of them submitted at once; each that ends is
replaced until all have run. Steps go through the replica's own pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from replica.core.scheduler import Scheduler
from replica.core.sequence import Finish
from replica.core.sequence import Sequence as Request
from replica.engine.flight import StepRunner
from replica.pipeline import Pipeline


@dataclass(slots=True)
class Measured:
    wall_s: float = 0.0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)  # to the first token, a request
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, rows, tokens
    host_s: list[float] = field(default_factory=list)  # of a step's planning, launch and settling
    gaps: list[float] = field(default_factory=list)  # between tokens of one request
    texts: dict[str, list[int]] = field(default_factory=dict)


def closed_loop(
    scheduler: Scheduler,
    runner: StepRunner,
    requests: Sequence[Request],
    concurrency: int,
    *,
    between: Callable[[], None] = lambda: None,
) -> Measured:
    """`between` is called between two turns: it moves adapters."""
    measured = Measured()
    waiting = list(reversed(requests))
    sent: dict[str, float] = {}
    told: dict[str, float] = {}
    pipeline = Pipeline(scheduler=scheduler, runner=runner, clock=perf_counter)
    began = before = perf_counter()
    left = len(requests)
    while left:
        now = perf_counter()
        while waiting and len(sent) < concurrency:
            request = waiting.pop()
            sent[request.id] = now
            scheduler.add(request, now)
        between()
        turn = pipeline.turn()
        then = perf_counter()
        if turn.landed is not None:
            rows = len(turn.landed.rows)
            measured.steps.append((then - before, rows, turn.landed.total_tokens))
            before = then
        for item in turn.progress:
            if item.token is not None:
                measured.tokens += 1
                if item.seq in told:
                    measured.gaps.append(then - told[item.seq])
                else:
                    measured.first_s.append(then - sent[item.seq])
                told[item.seq] = then
            if item.finish is not None:
                assert item.finish is not Finish.ERROR, item.reason
                left -= 1
                del sent[item.seq], told[item.seq]
        measured.host_s.append(perf_counter() - now - turn.waited)
    measured.wall_s = perf_counter() - began
    measured.texts = {request.id: list(request.output) for request in requests}
    return measured
