"""Demand: what a fleet will be asked for, from a trace or from a recipe.

The rate is that of the fullest minute; what is simulated is the busiest stretch. An adapter's share
is of all requests; its rank and bytes come from a list (`loraplex adapter list --json`) or from a
mix of ranks that is dealt out over the adapters without regard to their popularity.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final

from loadtests.popularity import shares
from loadtests.recipe import Recipe
from loadtests.trace import Arrival, Trace
from shared.ids import AdapterId

_MINUTE_S: Final = 60.0
_VISIT_PART: Final = 1 / 8
_VISIT_SHARE: Final = 0.9
_VISIT_REQUESTS: Final = 20
_GOLDEN: Final = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    name: str
    share: float  # of all requests
    rank: int
    size_bytes: float


@dataclass(frozen=True, slots=True)
class TenantDemand:
    """A minute of it: on average, and the fullest one."""

    name: str
    requests_per_min: float
    tokens_per_min: float
    peak_requests_per_min: float
    peak_tokens_per_min: float


@dataclass(frozen=True, slots=True)
class Visit:
    """An adapter that is wanted in one part of the trace and hardly ever else."""

    adapter: str
    starts_s: float
    ends_s: float
    rate_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    rate_per_s: float  # in the fullest minute
    prompt_tokens: float  # mean
    output_tokens: float
    longest_tokens: int  # prompt and output of the longest request
    base_share: float
    adapters: tuple[AdapterDemand, ...]  # most wanted first
    tenants: tuple[TenantDemand, ...] = ()
    visits: tuple[Visit, ...] = ()

    @property
    def shares(self) -> list[float]:
        return [adapter.share for adapter in self.adapters]

    @property
    def bytes(self) -> float:
        return math.fsum(adapter.size_bytes for adapter in self.adapters)

    @property
    def mean_bytes(self) -> float:
        return self.bytes / len(self.adapters) if self.adapters else 0.0

    @property
    def max_rank(self) -> int:
        return max((adapter.rank for adapter in self.adapters), default=0)

    def only(self, names: Collection[str]) -> Demand:
        """The part that asks for these adapters, at its own rate."""
        return self._part([a for a in self.adapters if a.name in names], 0.0)

    def without(self, names: Collection[str]) -> Demand:
        return self._part([a for a in self.adapters if a.name not in names], self.base_share)

    def _part(self, kept: Sequence[AdapterDemand], base_share: float) -> Demand:
        part = math.fsum(adapter.share for adapter in kept) + base_share
        scale = 1 / part if part else 0.0
        return replace(
            self,
            rate_per_s=self.rate_per_s * part,
            base_share=base_share * scale,
            adapters=tuple(replace(a, share=a.share * scale) for a in kept),
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rank and bytes of an adapter: what a list says, else a mix of ranks."""

    rank_bytes: float  # of one rank over all adapted projections
    mix: tuple[tuple[int, float], ...] = ((16, 1.0),)  # (rank, weight)
    known: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def of(self, number: int, name: str) -> tuple[int, float]:
        """Law: among the first n numbers each rank of the mix has its part, to within a few."""
        if (told := self.known.get(name)) is not None:
            return told
        total = math.fsum(weight for _, weight in self.mix)
        upto = list(accumulate(weight / total for _, weight in self.mix))
        drawn = (number + 0.5) * _GOLDEN % 1.0
        rank = self.mix[min(bisect_left(upto, drawn), len(self.mix) - 1)][0]
        return rank, rank * self.rank_bytes


def of_trace(trace: Trace, sizes: Sizes) -> Demand:
    """Raises ValueError when it is too short to have a rate."""
    if len(trace) < 2:
        raise ValueError("a plan needs a trace of at least two arrivals")
    counts = Counter(row.adapter for row in trace if row.adapter is not None)
    ranked = sorted(counts, key=lambda name: (-counts[name], name))
    numbers = {name: number for number, name in enumerate(sorted(counts))}
    return Demand(
        rate_per_s=_peak_rate(trace),
        prompt_tokens=sum(row.prompt_tokens for row in trace) / len(trace),
        output_tokens=sum(row.output_tokens for row in trace) / len(trace),
        longest_tokens=max(row.prompt_tokens + row.output_tokens for row in trace),
        base_share=1 - counts.total() / len(trace),
        adapters=tuple(
            AdapterDemand(str(name), counts[name] / len(trace), *sizes.of(numbers[name], name))
            for name in ranked
        ),
        tenants=_tenants(trace),
        visits=_visits(trace),
    )


def of_recipe(recipe: Recipe, sizes: Sizes) -> Demand:
    """By the law itself, not by a sample of it: rare adapters are there too."""
    law = shares(recipe.popularity, recipe.adapters, recipe.skew)
    width = len(str(recipe.adapters - 1))
    named = 1 - recipe.base_share
    adapters = [
        AdapterDemand(
            f"adapter-{n:0{width}d}", named * share, *sizes.of(n, f"adapter-{n:0{width}d}")
        )
        for n, share in enumerate(law)
    ]
    tokens = recipe.prompt_tokens_mean + recipe.output_tokens_mean
    tenants = []
    for number in range(recipe.tenants):
        share = recipe.base_share / recipe.tenants + named * math.fsum(
            law[number :: recipe.tenants]
        )
        minute = 60 * recipe.rate_per_s * share
        peak = minute + 3 * recipe.burstiness * math.sqrt(minute)  # of independent gaps
        tenants.append(
            TenantDemand(f"tenant-{number}", minute, minute * tokens, peak, peak * tokens)
        )
    return Demand(
        rate_per_s=recipe.rate_per_s,
        prompt_tokens=recipe.prompt_tokens_mean,
        output_tokens=recipe.output_tokens_mean,
        longest_tokens=recipe.prompt_tokens_max + recipe.output_tokens_max,
        base_share=recipe.base_share,
        adapters=tuple(adapters),
        tenants=tuple(sorted(tenants, key=lambda one: -one.requests_per_min)),
    )


def busiest(trace: Trace, arrivals: int) -> Trace:
    """The stretch of so many arrivals that took the least time; its times begin at zero."""
    if len(trace) <= arrivals:
        first = 0
    else:
        first = min(
            range(len(trace) - arrivals + 1),
            key=lambda at: (trace[at + arrivals - 1].at_s - trace[at].at_s, at),
        )
    begin = trace[first].at_s
    return tuple(replace(row, at_s=row.at_s - begin) for row in trace[first : first + arrivals])


def _peak_rate(trace: Trace) -> float:
    """Arrivals a second in the fullest minute, or over all of a trace that is shorter."""
    span = trace[-1].at_s - trace[0].at_s
    if span <= _MINUTE_S:
        return (len(trace) - 1) / span if span else float(len(trace))
    most = first = 0
    for last, row in enumerate(trace):
        while row.at_s - trace[first].at_s > _MINUTE_S:
            first += 1
        most = max(most, last - first + 1)
    return most / _MINUTE_S


def _tenants(trace: Trace) -> tuple[TenantDemand, ...]:
    """The largest first."""
    span_min = max((trace[-1].at_s - trace[0].at_s) / _MINUTE_S, 1.0)

    def counted(weight: Callable[[Arrival], int]) -> tuple[Counter[str], dict[str, int]]:
        sums: Counter[str] = Counter()
        minutes: Counter[tuple[str, int]] = Counter()
        for row in trace:
            sums[row.tenant] += weight(row)
            minutes[row.tenant, int((row.at_s - trace[0].at_s) / _MINUTE_S)] += weight(row)
        peaks: dict[str, int] = {}
        for (name, _), count in minutes.items():
            peaks[name] = max(peaks.get(name, 0), count)
        return sums, peaks

    requests, request_peaks = counted(lambda row: 1)
    tokens, token_peaks = counted(lambda row: row.prompt_tokens + row.output_tokens)
    return tuple(
        TenantDemand(
            name,
            requests[name] / span_min,
            tokens[name] / span_min,
            request_peaks[name],
            token_peaks[name],
        )
        for name in sorted(requests, key=lambda name: (-requests[name], name))
    )


def _visits(trace: Trace) -> tuple[Visit, ...]:
    """Adapters with nearly all their requests in a small part of the trace."""
    begin, span = trace[0].at_s, trace[-1].at_s - trace[0].at_s
    times: dict[AdapterId, list[float]] = {}
    for row in trace:
        if row.adapter is not None:
            times.setdefault(row.adapter, []).append(row.at_s - begin)
    found = []
    for name, asked in sorted(times.items()):
        nearly = math.ceil(_VISIT_SHARE * len(asked))
        if len(asked) < _VISIT_REQUESTS:
            continue
        start, end = min(
            zip(asked, asked[nearly - 1 :], strict=False), key=lambda ends: ends[1] - ends[0]
        )
        if 0 < end - start <= _VISIT_PART * span:
            found.append(Visit(str(name), start, end, nearly / (end - start)))
    return tuple(found)
