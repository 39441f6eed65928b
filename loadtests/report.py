"""Report: what a replay says about a fleet, as figures and as one page.

The page holds what a person asks first: how long the first token took, by how popular the adapter
is; where adapters were found; whether tenants were served alike; how long requests queued; how the
replicas shared the work; who was refused. A run whose generator fell behind says so on top.
With readings of the replicas it also tells loads into slots, and how busy each replica was.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

from loadtests.chart import bars, lines, page, paragraph, table
from loadtests.outcome import Outcome
from loadtests.readings import Reading, by_replica
from loadtests.stats import jain, percentile, summarise

LATE_P99_MS: Final = 50.0
_WINDOWS: Final = 60
_QUANTILES: Final = tuple(range(1, 100))
_TIMES: Final = {
    "ttft_ms": "first token",
    "itl_ms": "between tokens",
    "end_to_end_ms": "end to end",
    "queue_ms": "queue of the gateway",
    "late_ms": "lateness of the generator",
}
_COUNTS: Final = {
    "sent": "sent",
    "failed": "failed",
    "wall_s": "seconds",
    "completion_tokens": "tokens",
    "jain_of_served_share": "fairness (Jain)",
}
_TENANTS_MAX: Final = 20
_BARS_MAX: Final = 12
_CLASSES: Final = ((1, "the first"), (10, "2-10"), (50, "11-50"), (1 << 30, "beyond"))


@dataclass(frozen=True, slots=True)
class Watched:
    """The replicas while the outcomes came about; requests for the base need no adapter.

    `tiers` tells where adapters were found, if that is known better than from readings.
    """

    readings: Sequence[Reading] = ()
    base: str = ""
    tiers: Mapping[str, float] | None = None


def figures(outcomes: Sequence[Outcome], watched: Watched = Watched()) -> dict[str, Any]:
    """What runs are compared by."""
    good = [row for row in outcomes if not row.failure]
    asked, served = Counter(r.tenant for r in outcomes), Counter(r.tenant for r in good)
    return {
        "sent": len(outcomes),
        "failed": len(outcomes) - len(good),
        "failures": dict(Counter(row.failure[:80] for row in outcomes if row.failure)),
        "wall_s": max((row.due_s + row.total_s for row in outcomes), default=0.0),
        "late_ms": _ms(row.late_s for row in outcomes),
        "ttft_ms": _ms(row.first_s for row in good),
        "itl_ms": _ms(row.itl_s for row in good),
        "end_to_end_ms": _ms(row.total_s for row in good),
        "queue_ms": asdict(summarise(r.queue_ms for r in good if r.queue_ms is not None)),
        "events": sum(row.events for row in outcomes),
        "completion_tokens": sum(row.completion_tokens or row.events for row in good),
        "found": _shares(row.placement for row in good if row.placement),
        "replicas": dict(sorted(Counter(row.replica for row in good if row.replica).items())),
        "jain_of_served_share": jain([served[name] / asked[name] for name in sorted(asked)]),
        "tiers": watched.tiers or _tiers(sum(r.adapter != watched.base for r in good), watched),
        "busy": {name: r[-1].busy(r[0]) for name, r in by_replica(watched.readings).items()},
    }


def report(
    outcomes: Sequence[Outcome],
    *,
    title: str,
    notes: Iterable[str] = (),
    watched: Watched = Watched(),
    more: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """HTML of a run; `more` are further sections of the page."""
    told = figures(outcomes, watched)
    late = told["late_ms"]["p99"]
    top = [paragraph(note) for note in notes]
    if late > LATE_P99_MS:
        top.insert(0, paragraph(
            f"The generator fell behind: p99 lateness {late:.0f} ms. This run did not replay the "
            "trace it claims to; do not compare it.", bad=True))  # fmt: skip
    measured = [{"ms": words, **told[name]} for name, words in _TIMES.items()]
    good = [row for row in outcomes if not row.failure]
    return page(title, {
        "In short": [
            *top,
            table([{words: told[name] for name, words in _COUNTS.items()}], [*_COUNTS.values()]),
            table(measured, ["ms", "count", "mean", "p50", "p95", "p99", "max"]),
        ],
        "First token": [_by_popularity(good), _ttft_over_time(good)],
        "Where adapters were found, and who did the work": _where(told),
        "Queue and load": [
            _queue_over_time(good), _in_flight(outcomes), _in_flight_by_replica(good),
            *_steps(watched.readings),
        ],
        "Tenants": [_tenants(outcomes), _first_by_tenant(good)],
        "Refused and failed": [_failures(told["failures"])],
        **more,
    })  # fmt: skip


def _tiers(asked: int, watched: Watched) -> dict[str, float]:
    """Share of the requests for an adapter that needed no load into a slot, and one from where.

    A load that nobody waited for, ordered ahead, counts against the first.
    """
    if not asked or not watched.readings:
        return {}
    both = [(of_one[0], of_one[-1]) for of_one in by_replica(watched.readings).values()]
    host = sum(last.host_loads - first.host_loads for first, last in both) / asked
    disk = sum(last.disk_loads - first.disk_loads for first, last in both) / asked
    return {"gpu": max(1 - host - disk, 0.0), "host": host, "disk": disk}


def _where(told: Mapping[str, Any]) -> list[str]:
    parts = [
        bars("Placements", told["found"], y="share"),
        bars("Requests a replica", told["replicas"], y="requests"),
    ]
    if told["tiers"]:
        parts.insert(0, bars("Hits by tier", told["tiers"], y="share"))
    if told["busy"]:
        parts.append(bars("Time in steps a replica", told["busy"], y="share"))
    return parts


def _in_flight_by_replica(good: Sequence[Outcome]) -> str:
    """From when the gateway sent them on until their end."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in good:
        if row.replica:
            sent_s = row.due_s + row.late_s + (row.queue_ms or 0.0) / 1e3
            spans[row.replica].append((sent_s, row.due_s + row.total_s))
    series = {name: _overlap(spans[name]) for name in sorted(spans)}
    return lines("In flight at each replica, mean", series, x="s", y="requests")


def _steps(readings: Sequence[Reading]) -> list[str]:
    """Mean time of a step between two readings, one line a replica."""
    if not readings:
        return []
    series = {
        name: [
            (now.at_s, (now.step_s - before.step_s) / (now.steps - before.steps) * 1e3)
            for before, now in pairwise(of_one)
            if now.steps > before.steps
        ]
        for name, of_one in by_replica(readings).items()
    }
    return [lines("Mean time of a step", series, x="s", y="ms")]


def _first_by_tenant(good: Sequence[Outcome]) -> str:
    by_tenant: dict[str, list[float]] = defaultdict(list)
    for row in good:
        if row.first_s is not None:
            by_tenant[row.tenant].append(row.first_s * 1e3)
    most = sorted(by_tenant.items(), key=lambda item: (-len(item[1]), item[0]))[:_BARS_MAX]
    p95 = {name: percentile(sorted(values), 95) for name, values in most}
    return bars("First token p95 by tenant", p95, y="ms")


def _by_popularity(good: Sequence[Outcome]) -> str:
    """Distribution of TTFT, one line a class of adapters by rank."""
    ranks = {
        name: rank
        for rank, (name, _) in enumerate(Counter(r.adapter for r in good).most_common(), start=1)
    }
    classes: dict[str, list[float]] = defaultdict(list)
    for row in good:
        if row.first_s is not None:
            label = next(name for upto, name in _CLASSES if ranks[row.adapter] <= upto)
            classes[label].append(row.first_s * 1e3)
    series = {}
    for name in (label for _, label in _CLASSES if label in classes):
        ordered = sorted(classes[name])
        series[name] = [(percentile(ordered, q), q / 100) for q in _QUANTILES]
    return lines(
        "First token by popularity of the adapter", series, x="ms", y="share below", log_x=True
    )


def _ttft_over_time(good: Sequence[Outcome]) -> str:
    windows = _windows(good, lambda row: None if row.first_s is None else row.first_s * 1e3)
    series = {
        f"p{q}": [(at, percentile(sorted(values), q)) for at, values in windows] for q in (50, 99)
    }
    return lines("First token over the run", series, x="s", y="ms", log_y=True)


def _queue_over_time(good: Sequence[Outcome]) -> str:
    windows = _windows(good, lambda row: row.queue_ms)
    series = {
        f"p{q}": [(at, percentile(sorted(values), q)) for at, values in windows] for q in (50, 99)
    }
    return lines("Wait in the gateway's queue", series, x="s", y="ms")


def _in_flight(outcomes: Sequence[Outcome]) -> str:
    points = _overlap([(row.due_s, row.due_s + row.total_s) for row in outcomes])
    return lines("Requests in flight, mean", {"in flight": points}, x="s", y="requests")


def _overlap(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """How many spans hold a moment, on average over each of `_WINDOWS` windows."""
    until = max((end for _, end in spans), default=0.0) or 1.0
    width = until / _WINDOWS
    held = [0.0] * _WINDOWS
    for begin, end in spans:
        for window in range(int(begin / width), min(int(end / width), _WINDOWS - 1) + 1):
            held[window] += min(end, (window + 1) * width) - max(begin, window * width)
    return [((window + 0.5) * width, area / width) for window, area in enumerate(held)]


def _tenants(outcomes: Sequence[Outcome]) -> str:
    by_tenant: dict[str, list[Outcome]] = defaultdict(list)
    for row in outcomes:
        by_tenant[row.tenant].append(row)
    largest = sorted(by_tenant.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = []
    for name, asked in largest[:_TENANTS_MAX]:
        first = sorted(r.first_s * 1e3 for r in asked if r.first_s is not None)
        rows.append({
            "tenant": name,
            "sent": len(asked),
            "failed": sum(bool(row.failure) for row in asked),
            "tokens": sum(row.completion_tokens or row.events for row in asked),
            "p50 ms": percentile(first, 50),
            "p99 ms": percentile(first, 99),
        })  # fmt: skip
    return table(rows, ["tenant", "sent", "failed", "tokens", "p50 ms", "p99 ms"])


def _failures(failures: Mapping[str, int]) -> str:
    if not failures:
        return paragraph("None: every request was answered in full.")
    rows = [{"failure": name, "requests": count} for name, count in failures.items()]
    return table(rows, ["failure", "requests"])


def _windows(
    rows: Sequence[Outcome], value: Callable[[Outcome], float | None]
) -> list[tuple[float, list[float]]]:
    """Values by the time their requests were due, in at most `_WINDOWS` windows."""
    span = max((row.due_s for row in rows), default=0.0) or 1.0
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        told = value(row)
        if told is not None:
            found[int(row.due_s / span * (_WINDOWS - 1))].append(told)
    return [(number * span / (_WINDOWS - 1), values) for number, values in sorted(found.items())]


def _ms(seconds: Iterable[float | None]) -> dict[str, float]:
    return asdict(summarise(value * 1e3 for value in seconds if value is not None))


def _shares(names: Iterable[str]) -> dict[str, float]:
    counts = Counter(names)
    total = counts.total()
    return {name: count / total for name, count in sorted(counts.items())}
