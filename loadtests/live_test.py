"""Live test: a trace replayed open loop against a fleet that `loraplex up` starts and ends for it.

The trace's adapters are brought there and its tenants get keys. What comes of it are outcomes,
readings of the replicas meanwhile, and the prices that fit their steps. One whose generator fell
behind is no test, for it was not this trace.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import orjson

from loadtests import outcome as outcomes
from loadtests import trace as traces
from loadtests.chart import table
from loadtests.fit import fit
from loadtests.outcome import Outcome
from loadtests.readings import as_csv, watching
from loadtests.report import Watched, figures, report
from loadtests.trace import Trace
from loadtests.up_fleet import Shape, UpFleet

REFUSED: Final = "HTTP 429"
_LOCUSTFILE: Final = Path(__file__).parent / "locustfile.py"
GENERATORS: Final = ("locust", "asyncio")


class GeneratorFailed(Exception):
    """It ended without outcomes; the text is what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTest:
    trace: Trace
    title: str
    shape: Shape = field(default_factory=Shape)
    generators: tuple[str, ...] = ("locust",)
    late_p99_ms: float = 50.0
    requests_per_min: int | None = None  # of each tenant: what is above is refused, as it should
    skip: float = 0.1  # the first part, in which caches fill, is replayed but not counted
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What one generator saw, and the replicas meanwhile."""

    outcomes: tuple[Outcome, ...]
    watched: Watched

    def counted(self, skip: float) -> tuple[Outcome, ...]:
        after_s = skip * max((row.due_s for row in self.outcomes), default=0.0)
        return tuple(row for row in self.outcomes if row.due_s >= after_s)


async def run(test: LiveTest) -> dict[str, Replayed]:
    """By generator, each on a fresh fleet: prompts that were seen before would be cached."""
    return {name: await _replayed(test, name) for name in test.generators}


async def _replayed(test: LiveTest, generator: str) -> Replayed:
    names = sorted({str(row.adapter) for row in test.trace if row.adapter is not None})
    tenants = sorted({str(row.tenant) for row in test.trace})
    limits = {} if test.requests_per_min is None else {"requests_per_min": test.requests_per_min}
    with TemporaryDirectory(prefix="loadtest-") as made:
        folder = Path(made)
        traces.write(test.trace, folder / "trace.jsonl")
        async with UpFleet(folder, test.shape, names) as fleet:
            keys = await fleet.register(tenants, limits)
            (folder / "keys.json").write_bytes(orjson.dumps(keys))
            await fleet.settled()
            async with watching(fleet.replicas) as readings:
                done = await _generate(generator, folder, fleet, test.late_p99_ms)
            return Replayed(outcomes=done, watched=Watched(readings, fleet.base))


async def _generate(
    generator: str, folder: Path, fleet: UpFleet, late_p99_ms: float
) -> tuple[Outcome, ...]:
    found = folder / f"{generator}.jsonl"
    if generator == "locust":
        words = ["locust", "-f", str(_LOCUSTFILE), "--headless", "--only-summary"]
        words += ["--host", fleet.url]
    else:
        words = ["loadtests.replay", "--url", fleet.url]
    words += ["--trace", str(folder / "trace.jsonl"), "--keys", str(folder / "keys.json")]
    words += ["--base", fleet.base, "--late-p99-ms", str(late_p99_ms), "--outcomes", str(found)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if not found.exists():
        raise GeneratorFailed(said.decode(errors="replace")[-2000:])
    return outcomes.read(found)


def faults(test: LiveTest, replayed: dict[str, Replayed]) -> list[str]:
    """Why it is no valid test, or no success; empty: all is well.

    Refusals by quota are answers where limits were asked for, and faults elsewhere.
    """
    found = []
    for name, one in replayed.items():
        told = figures(one.outcomes)
        late_ms = told["late_ms"]["p99"]
        if late_ms > test.late_p99_ms:
            found.append(
                f"the generator {name} fell behind: p99 lateness {late_ms:.0f} ms, above "
                f"{test.late_p99_ms:g}. Lower --rate, or free the machine's cores."
            )
        for failure, count in told["failures"].items():
            if test.requests_per_min is None or failure != REFUSED:
                found.append(f"{name}: {count} requests: {failure}")
    return found


def told_figures(test: LiveTest, replayed: dict[str, Replayed]) -> dict[str, Any]:
    """For a file: figures of the first generator, and the first token as each has seen it."""
    first = next(iter(replayed.values()))
    shape = test.shape
    return {
        "title": test.title,
        "notes": list(test.notes),
        "fleet": {
            "replicas": shape.replicas,
            "slots": shape.slots,
            "host": shape.host,
            "capacity": shape.capacity,
            "base": str(shape.base.name) if shape.base else f"random, {shape.size}",
        },
        "arrivals": len(test.trace),
        "adapters": len({row.adapter for row in test.trace if row.adapter is not None}),
        "tenants": len({row.tenant for row in test.trace}),
        "skip": test.skip,
        "faults": faults(test, replayed),
        **figures(first.counted(test.skip), first.watched),
        "ttft_ms_by_generator": {
            name: figures(one.counted(test.skip))["ttft_ms"] for name, one in replayed.items()
        },
        **_fitted(first, shape),
    }


def _fitted(replayed: Replayed, shape: Shape) -> dict[str, Any]:
    """Prices as `loraplex plan` and `simulate` take them, and how well they fit."""
    found = fit(replayed.watched.readings, replayed.outcomes)
    places = {"capacity": shape.capacity, "step_tokens_max": shape.step_tokens_max}
    return {
        "prices": {**found.prices(), **places},
        "fit": {
            "between_steps_s": found.between_s,
            "windows": found.windows,
            "error_of_a_window": found.error,
        },
    }


def write(test: LiveTest, replayed: dict[str, Replayed], out: Path, command: str) -> dict[str, Any]:
    """A page, tables of requests and readings, the figures and the trace; the figures again."""
    out.mkdir(parents=True, exist_ok=True)
    told = {"command": command, **told_figures(test, replayed)}
    first = next(iter(replayed.values()))
    page = report(
        first.counted(test.skip),
        title=test.title,
        notes=(*test.notes, *_setting(test, told), *(f"Fault: {one}" for one in told["faults"])),
        watched=first.watched,
        more=_by_generator(told) if len(replayed) > 1 else {},
    )
    (out / "report.html").write_text(page)
    (out / "requests.csv").write_text(outcomes.as_csv(first.outcomes))
    (out / "replicas.csv").write_text(as_csv(first.watched.readings))
    traces.write(test.trace, out / "trace.jsonl")
    data = orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    (out / "figures.json").write_bytes(data)
    return told


def _setting(test: LiveTest, told: dict[str, Any]) -> list[str]:
    shape = test.shape
    return [
        f"{told['arrivals']} requests of {told['tenants']} tenants for {told['adapters']} "
        f"adapters, to {shape.replicas} replicas of {shape.slots} slots, {shape.host} adapters in "
        f"host memory and {shape.capacity} places each; the first {test.skip:.0%} of the time is "
        "left out below.",
        "Prices that fit the replicas' steps: "
        + ", ".join(f"{name} {value:.3g}" for name, value in told["prices"].items())
        + ".",
    ]


def _by_generator(told: dict[str, Any]) -> dict[str, list[str]]:
    rows = [{"generator": name, **ttft} for name, ttft in told["ttft_ms_by_generator"].items()]
    columns = ["generator", "count", "mean", "p50", "p95", "p99", "max"]
    return {"First token as each generator saw it, ms": [table(rows, columns)]}
