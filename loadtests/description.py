"""What a trace is like: its counts, its rate, its skew."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise

from loadtests.popularity import zipf
from loadtests.stats import percentile
from loadtests.trace import BadTrace, Trace


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts or outputs, in tokens; `mu` and `sigma` are the logarithm's (log-normal fit)."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float
    mu: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Description:
    """What a trace is like, for a person to read before using it."""

    arrivals: int
    duration_s: float
    rate_per_s: float
    gap_cv: float  # standard deviation of the gaps over their mean: 1 for Poisson, more is bursty
    gamma_shape: float | None  # of gaps by moments, 1 / cv^2; None when they do not vary
    dispersion: dict[str, float]  # variance over mean of the counts in bins of 1, 10 and 60 s
    sessions: int
    tenants: int
    adapters: int
    base_share: float
    top_adapter_share: float  # of the requests that name an adapter
    adapters_for_80_percent: int  # the working set: so many adapters take 80 % of those requests
    skew: float | None  # fitted s of Zipf; None when fewer than two adapters are named
    prompt: Lengths
    output: Lengths


def describe(trace: Trace) -> Description:
    """Raises BadTrace when there is nothing to describe."""
    if not trace:
        raise BadTrace("the trace is empty")
    counts = sorted(Counter(a.adapter for a in trace if a.adapter is not None).values())[::-1]
    named, total = sum(counts), len(trace)
    gaps = [after.at_s - before.at_s for before, after in pairwise(trace)]
    mean_gap = math.fsum(gaps) / len(gaps) if gaps else 0.0
    variance = math.fsum((gap - mean_gap) ** 2 for gap in gaps) / len(gaps) if gaps else 0.0
    gap_cv = math.sqrt(variance) / mean_gap if mean_gap else 0.0
    return Description(
        arrivals=total,
        duration_s=trace[-1].at_s - trace[0].at_s,
        rate_per_s=1 / mean_gap if mean_gap else 0.0,
        gap_cv=gap_cv,
        gamma_shape=gap_cv**-2 if gap_cv else None,
        dispersion={f"{width} s": _dispersion(trace, width) for width in (1, 10, 60)},
        sessions=len({a.session for a in trace if a.session is not None}),
        tenants=len({a.tenant for a in trace}),
        adapters=len(counts),
        base_share=1 - named / total,
        top_adapter_share=counts[0] / named if named else 0.0,
        adapters_for_80_percent=sum(seen < 0.8 * named for seen in accumulate(counts, initial=0)),
        skew=fit_skew(counts) if len(counts) > 1 else None,
        prompt=_lengths([a.prompt_tokens for a in trace]),
        output=_lengths([a.output_tokens for a in trace]),
    )


def _lengths(tokens: list[int]) -> Lengths:
    ordered = sorted(tokens)
    logs = [math.log(value) for value in ordered]
    mu = math.fsum(logs) / len(logs)
    spread = math.fsum((value - mu) ** 2 for value in logs) / len(logs)
    p50, p95, p99 = (percentile(ordered, q) for q in (50, 95, 99))
    mean = sum(ordered) / len(ordered)
    return Lengths(mean, p50, p95, p99, ordered[-1], mu, math.sqrt(spread))


def _dispersion(trace: Trace, width_s: float) -> float:
    """Index of dispersion of counts: 1 for Poisson whatever the width. Nan under two whole bins."""
    begin = trace[0].at_s
    bins = int((trace[-1].at_s - begin) / width_s)
    if bins < 2:
        return math.nan
    counts = Counter(int((a.at_s - begin) / width_s) for a in trace)
    told = [counts[number] for number in range(bins)]
    mean = sum(told) / bins
    return math.fsum((count - mean) ** 2 for count in told) / bins / mean if mean else math.nan


def fit_skew(counts: list[int]) -> float:
    """Most likely Zipf exponent of counts sorted from the largest, clipped to 0..4.

    The likelihood sum_r n_r (-s ln r) - n ln H_N(s) is concave in s; its derivative is zero where
    the mean of ln r under the law equals that of the data, found by bisection. Ranks are those of
    the counts themselves, which leans a little towards more skew when counts are small.
    """
    observed = math.fsum(n * math.log(r) for r, n in enumerate(counts, start=1)) / sum(counts)
    low, high = 0.0, 4.0
    for _ in range(40):
        middle = (low + high) / 2
        law = zipf(len(counts), middle)
        expected = math.fsum(p * math.log(r) for r, p in enumerate(law, start=1))
        low, high = (middle, high) if expected > observed else (low, middle)
    return round((low + high) / 2, 6)
