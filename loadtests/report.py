"""Report: what a replay says about a fleet, as figures and as one page.

The page holds what a person asks first: how long the first token took, by how popular the adapter
is; where adapters were found; whether tenants were served alike; how long requests queued; how the
replicas shared the work; who was refused. A run whose generator fell behind says so on top.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from loadtests.chart import bars, lines, page, paragraph, table
from loadtests.outcome import Outcome
from loadtests.stats import jain, percentile, summarise

LATE_P99_MS: Final = 50.0
_WINDOWS: Final = 60
_QUANTILES: Final = tuple(range(1, 100))
_TENANTS_MAX: Final = 20
_CLASSES: Final = ((1, "first"), (10, "2-10"), (50, "11-50"), (1 << 30, "beyond 50"))


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
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
    }


def report(outcomes: Sequence[Outcome], *, title: str, notes: Iterable[str] = ()) -> str:
    """HTML of a run."""
    told = figures(outcomes)
    late = told["late_ms"]["p99"]
    top = [paragraph(note) for note in notes]
    if late > LATE_P99_MS:
        top.insert(0, paragraph(
            f"The generator fell behind: p99 lateness {late:.0f} ms. This run did not replay the "
            "trace it claims to; do not compare it.", bad=True))  # fmt: skip
    kinds = ("ttft_ms", "itl_ms", "end_to_end_ms", "queue_ms", "late_ms")
    measured = [{"time": name, **told[name]} for name in kinds]
    good = [row for row in outcomes if not row.failure]
    return page(title, {
        "In short": [
            *top,
            table([{k: told[k] for k in ("sent", "failed", "wall_s", "completion_tokens",
                                         "jain_of_served_share")}],
                  ["sent", "failed", "wall_s", "completion_tokens", "jain_of_served_share"]),
            table(measured, ["time", "count", "mean", "p50", "p95", "p99", "max"]),
        ],
        "First token": [_by_popularity(good), _ttft_over_time(good)],
        "Where adapters were found, and who did the work": [
            bars("Share of requests by placement", told["found"], y="share"),
            bars("Requests a replica", told["replicas"], y="requests"),
        ],
        "Queue and load": [_queue_over_time(good), _in_flight(outcomes)],
        "Tenants": [_tenants(outcomes)],
        "Refused and failed": [_failures(told["failures"])],
    })  # fmt: skip


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
            classes[f"adapters by popularity: {label}"].append(row.first_s * 1e3)
    series = {}
    for name, values in sorted(classes.items()):
        ordered = sorted(values)
        series[name] = [(percentile(ordered, q), q / 100) for q in _QUANTILES]
    return lines("Time to first token", series, x="ms", y="share at or below", log_x=True)


def _ttft_over_time(good: Sequence[Outcome]) -> str:
    windows = _windows(good, lambda row: None if row.first_s is None else row.first_s * 1e3)
    series = {
        f"p{q}": [(at, percentile(sorted(values), q)) for at, values in windows] for q in (50, 99)
    }
    return lines("TTFT over the run", series, x="s", y="ms", log_y=True)


def _queue_over_time(good: Sequence[Outcome]) -> str:
    windows = _windows(good, lambda row: row.queue_ms)
    series = {
        f"p{q}": [(at, percentile(sorted(values), q)) for at, values in windows] for q in (50, 99)
    }
    return lines("Wait in the gateway's queue", series, x="s", y="ms")


def _in_flight(outcomes: Sequence[Outcome]) -> str:
    changes = sorted(
        [(row.due_s, 1) for row in outcomes] + [(r.due_s + r.total_s, -1) for r in outcomes]
    )
    points, now = [], 0
    for at, change in changes:
        now += change
        points.append((at, float(now)))
    every = max(len(points) // 800, 1)
    return lines("Requests in flight", {"in flight": points[::every]}, x="s", y="requests")


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
            "ttft_p50_ms": percentile(first, 50),
            "ttft_p99_ms": percentile(first, 99),
        })  # fmt: skip
    return table(rows, ["tenant", "sent", "failed", "tokens", "ttft_p50_ms", "ttft_p99_ms"])


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
