"""Fit: the price list of a replica, from readings of it under load.

A step costs step_s + row_s * rows + prompt_token_s * prompt tokens (`prices`). That is linear, so
it holds for sums of steps as well: each pair of neighbouring readings is one equation

    seconds in steps = step_s * steps + row_s * decoded tokens + prompt_token_s * prompt tokens

and the prices are the least squares of all of them with no price below zero. With three unknowns
the best subset of prices above zero is found by trying every one. Every equation is divided by the
square root of its seconds: long windows say more, but not as much more as they are longer.

A replica does more than steps: it hands over what a step brought, plans the next, brings adapters
into slots. Clients see that time too, so it is had from them, and counts as part of every step:

    between steps = mean gap between two tokens of a request - mean step that tokens took part in

Loads: seconds over loads, by the tier they came from; a load from disk passes through host memory.
What readings do not tell apart is in the others' prices: distinct adapters of a step in row_s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loadtests.outcome import Outcome
from loadtests.readings import Reading, by_replica

_Equation = tuple[tuple[float, float, float], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Prices in seconds; `error` is the root mean square of a window's miss, over its mean.

    `between_s` is what `step_s` has of the time between steps.
    """

    step_s: float
    between_s: float
    row_s: float
    prompt_token_s: float
    host_load_s: float
    disk_load_s: float
    windows: int
    error: float

    def prices(self) -> dict[str, float]:
        """By their names in `Prices`; without loads of a kind that was not seen."""
        seen = {
            "step_s": self.step_s,
            "row_s": self.row_s,
            "prompt_token_s": self.prompt_token_s,
            "adapter_s": 0.0,
        }
        loads = {"host_load_s": self.host_load_s, "disk_load_s": self.disk_load_s}
        return seen | {name: value for name, value in loads.items() if value}


def fit(readings: Sequence[Reading], outcomes: Iterable[Outcome] = ()) -> Fit:
    """Raises ValueError when nothing was computed; without outcomes a replica does only steps."""
    equations = list(_equations(readings))
    if not equations:
        raise ValueError("no step was seen: watch the replicas while requests run")
    step_s, row_s, prompt_token_s = _least_squares(equations)
    miss = [_miss(equation, (step_s, row_s, prompt_token_s)) for equation in equations]
    mean = math.fsum(seconds for _, seconds in equations) / len(equations)
    host_s = _mean_load_s(readings, "host")
    between_s = _between_s(readings, outcomes)
    return Fit(
        step_s=step_s + between_s,
        between_s=between_s,
        row_s=row_s,
        prompt_token_s=prompt_token_s,
        host_load_s=host_s,
        disk_load_s=max(_mean_load_s(readings, "disk") - host_s, 0.0),
        windows=len(equations),
        error=math.sqrt(math.fsum(one * one for one in miss) / len(miss)) / mean,
    )


def _equations(readings: Sequence[Reading]) -> Iterator[_Equation]:
    for of_one in by_replica(readings).values():
        for before, after in pairwise(of_one):
            if after.step_s > before.step_s:
                computed = (
                    after.steps - before.steps,
                    after.decode_tokens - before.decode_tokens,
                    after.prefill_tokens - before.prefill_tokens,
                )
                yield computed, after.step_s - before.step_s


def _between_s(readings: Sequence[Reading], outcomes: Iterable[Outcome]) -> float:
    gaps = [
        (row.total_s - row.first_s, row.completion_tokens - 1)
        for row in outcomes
        if not row.failure and row.first_s is not None and row.completion_tokens
    ]
    tokens = sum(count for _, count in gaps)
    drawn = math.fsum(computed[1] for computed, _ in _equations(readings))
    if not tokens or not drawn:
        return 0.0
    seen_s = math.fsum(
        seconds / computed[0] * computed[1] for computed, seconds in _equations(readings)
    )
    return max(math.fsum(seconds for seconds, _ in gaps) / tokens - seen_s / drawn, 0.0)


def _least_squares(equations: Sequence[_Equation]) -> tuple[float, float, float]:
    best, least = (0.0, 0.0, 0.0), math.inf
    for chosen in range(1, 8):
        kept = [column for column in range(3) if chosen >> column & 1]
        found = _solved(equations, kept)
        if found is None or min(found) < 0:
            continue
        whole = dict(zip(kept, found, strict=True))
        prices = (whole.get(0, 0.0), whole.get(1, 0.0), whole.get(2, 0.0))
        square = math.fsum(_miss(one, prices) ** 2 * _weight(one) for one in equations)
        if square < least:
            best, least = prices, square
    return best


def _solved(equations: Sequence[_Equation], kept: Sequence[int]) -> list[float] | None:
    """The normal equations of some columns, by elimination; None when they are dependent."""
    rows = [
        [math.fsum(one[0][a] * one[0][b] * _weight(one) for one in equations) for b in kept]
        + [math.fsum(one[0][a] * one[1] * _weight(one) for one in equations)]
        for a in kept
    ]
    size = len(kept)
    whole = [rows[at][at] for at in range(size)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        rows[at], rows[pivot] = rows[pivot], rows[at]
        if abs(rows[at][at]) <= 1e-9 * whole[at]:
            return None
        for row in range(size):
            if row != at:
                part = rows[row][at] / rows[at][at]
                rows[row] = [x - part * y for x, y in zip(rows[row], rows[at], strict=True)]
    return [rows[at][size] / rows[at][at] for at in range(size)]


def _weight(equation: _Equation) -> float:
    return 1 / max(equation[1], 1e-6)


def _miss(equation: _Equation, prices: tuple[float, float, float]) -> float:
    computed, seconds = equation
    return math.fsum(x * y for x, y in zip(computed, prices, strict=True)) - seconds


def _mean_load_s(readings: Sequence[Reading], tier: str) -> float:
    """Since their start, so that what was brought before the run counts as well."""
    last = [of_one[-1] for of_one in by_replica(readings).values()]
    loads = math.fsum(getattr(one, f"{tier}_loads") for one in last)
    return math.fsum(getattr(one, f"{tier}_load_s") for one in last) / loads if loads else 0.0
