"""Portrait: what a trace is like, as one page of charts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import pairwise

from loadtests.chart import lines, page, table
from loadtests.description import Description
from loadtests.popularity import zipf
from loadtests.trace import Trace

_BINS = 200
_POINTS_MAX = 400


def portrait(trace: Trace, told: Description, name: str) -> str:
    """HTML of a trace that has been described."""
    facts = {
        key: value
        for key, value in asdict(told).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    lengths = [
        {"tokens": "prompt", **asdict(told.prompt)},
        {"tokens": "output", **asdict(told.output)},
    ]
    return page(
        f"Trace {name}",
        {
            "What it is": [
                table([facts], list(facts)),
                table(lengths, list(lengths[0])),
                table([told.dispersion], list(told.dispersion)),
            ],
            "Popularity and arrivals": [_popularity(trace, told), _rate(trace, told)],
            "Gaps and lengths": [
                _distribution("Gaps between arrivals", "s", [
                    b.at_s - a.at_s for a, b in pairwise(trace)
                ]),
                _distribution("Prompt", "tokens", [float(a.prompt_tokens) for a in trace]),
                _distribution("Output", "tokens", [float(a.output_tokens) for a in trace]),
            ],
        },
    )  # fmt: skip


def _popularity(trace: Trace, told: Description) -> str:
    counts = sorted(Counter(a.adapter for a in trace if a.adapter is not None).values())[::-1]
    total = sum(counts) or 1
    series = {"measured": [(float(r), n / total) for r, n in enumerate(counts, start=1)]}
    if told.skew is not None:
        law = zipf(len(counts), told.skew)
        fitted = [(float(r), share) for r, share in enumerate(law, start=1)]
        series[f"Zipf {told.skew:.2f}"] = fitted
    title = "Share of an adapter by rank"
    return lines(title, series, x="rank", y="share", log_x=True, log_y=True)


def _rate(trace: Trace, told: Description) -> str:
    width = told.duration_s / _BINS or 1.0
    begin = trace[0].at_s
    counts = Counter(int((a.at_s - begin) / width) for a in trace)
    points = [(number * width, counts[number] / width) for number in range(_BINS)]
    return lines("Arrivals over time", {"rate": points}, x="s", y="a second")


def _distribution(what: str, unit: str, values: list[float]) -> str:
    ordered = sorted(values)
    every = max(len(ordered) // _POINTS_MAX, 1)
    points = [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered) if i % every == 0]
    return lines(what, {"share at or below": points}, x=unit, y="share at or below", log_x=True)
