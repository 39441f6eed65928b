"""A closed loop over the engine's own API: scheduler and runner in one process, without HTTP.

`concurrency` requests are in flight, the first of them submitted at once; each that ends is
replaced until all have run. It drives the engine as `replica.loop` does: one step is under way
while the next is planned and queued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from replica.core.scheduler import Scheduler
from replica.core.sequence import Finish
from replica.core.sequence import Sequence as Request
from replica.core.step import Step


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
    runner: Any,
    requests: Sequence[Request],
    concurrency: int,
    *,
    between: Callable[[], None] = lambda: None,
    gaps: bool = False,
) -> Measured:
    """`between` is called between two steps: it moves adapters."""
    measured = Measured()
    waiting = list(reversed(requests))
    sent: dict[str, float] = {}
    told: dict[str, float] = {}
    flight: tuple[Step, Any] | None = None
    began = before = perf_counter()
    left = len(requests)
    while left:
        now = perf_counter()
        while waiting and len(sent) < concurrency:
            request = waiting.pop()
            sent[request.id] = now
            scheduler.add(request, now)
        between()
        step = scheduler.plan(now)
        ended = scheduler.collect()
        launched = None if step is None else (step, runner.launch(step))
        if step is not None:
            scheduler.advance(step)
        landing, flight = (flight, launched) if runner.overlaps else (launched, None)
        host = perf_counter() - now
        if landing is not None:
            drawn = landing[1].collect()
            then = perf_counter()
            tokens = {seq: each.token for seq, each in drawn.items() if each.token >= 0}
            ended += scheduler.settle(landing[0], tokens, then)
            rows = landing[0].rows
            measured.steps.append((then - before, len(rows), landing[0].total_tokens))
            before = then
            for item in ended:
                if item.token is not None:
                    measured.tokens += 1
                    if item.seq not in told:
                        measured.first_s.append(then - sent[item.seq])
                    elif gaps:
                        measured.gaps.append(then - told[item.seq])
                    told[item.seq] = then
                if item.finish is not None:
                    assert item.finish is not Finish.ERROR, item.reason
                    left -= 1
                    del sent[item.seq], told[item.seq]
            measured.host_s.append(host + perf_counter() - then)
    measured.wall_s = perf_counter() - began
    measured.texts = {request.id: list(request.output) for request in requests}
    return measured
