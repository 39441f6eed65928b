"""Numbers that runs are compared by: percentiles, and Jain's index of fairness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0..100) of values sorted upwards, by nearest rank: one of them, always.

    The smallest value with at least q % of all at or below it. Nan when there are none.
    """
    if not 0 <= q <= 100:
        raise ValueError(f"a percentile lies in 0..100, not {q}")
    if not ordered:
        return math.nan
    return ordered[max(math.ceil(len(ordered) * q / 100), 1) - 1]


def jain(shares: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all shares are equal, 1 / n when one has everything.

    Nothing shared is shared equally: 1 for no shares, or for zeros only.
    """
    squares = math.fsum(share * share for share in shares)
    return math.fsum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one measured quantity, in its own unit."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def summarise(values: Iterable[float]) -> Summary:
    ordered = sorted(values)
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered) if ordered else math.nan,
        p50=percentile(ordered, 50),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1] if ordered else math.nan,
    )
