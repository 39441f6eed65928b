"""A small load test from nothing: a real fleet by `loraplex up`, real generators, all ended."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.live_test import REFUSED, LiveTest, Replayed, faults, run, write
from loadtests.outcome import Outcome
from loadtests.recipe import Recipe, generate
from loadtests.report import Watched
from loadtests.up_fleet import Shape
from loadtests.weights import Size


def small(**fields: float) -> LiveTest:
    recipe = Recipe(
        arrivals=24, rate_per_s=8, adapters=5, tenants=2,
        prompt_tokens_mean=12, prompt_tokens_max=40, output_tokens_mean=4, output_tokens_max=8,
    )  # fmt: skip
    shape = Shape(replicas=1, slots=2, host=4, capacity=4, pages=256, size=Size())
    return replace(
        LiveTest(trace=tuple(generate(recipe)), title="small", shape=shape, late_p99_ms=5000),
        **fields,  # type: ignore[arg-type]
    )


def children() -> set[int]:
    """Processes that descend from this one."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int(
                (process / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue
    found, last = {os.getpid()}, 0
    while len(found) != last:
        last = len(found)
        found |= {one for one, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def test_lateness_and_failures_are_faults_and_refusals_that_were_asked_for_are_not() -> None:
    def replayed(*failures: str, late_s: float = 0.001) -> dict[str, Replayed]:
        rows = (Outcome(n, 1.0, "t", "a", late_s, 0.1, failure=f) for n, f in enumerate(failures))
        return {"locust": Replayed(outcomes=tuple(rows), watched=Watched())}

    test = small(late_p99_ms=50)
    assert faults(test, replayed("", "")) == []
    (late,) = faults(test, replayed("", "", late_s=0.08))
    assert "fell behind" in late
    assert "80 ms" in late
    assert faults(test, replayed("", REFUSED)) == ["locust: 1 requests: HTTP 429"]
    limited = replace(test, requests_per_min=6)
    assert faults(limited, replayed("", REFUSED)) == []
    assert faults(limited, replayed("", "HTTP 503")) == ["locust: 1 requests: HTTP 503"]


def test_what_is_counted_leaves_out_the_first_part_of_the_time() -> None:
    rows = tuple(Outcome(n, float(n), "t", "a") for n in range(11))
    one = Replayed(outcomes=rows, watched=Watched())
    assert [row.number for row in one.counted(0.3)] == list(range(3, 11))
    assert one.counted(0) == rows


@pytest.mark.long
async def test_a_load_test_leaves_a_report_and_nothing_that_runs(tmp_path: Path) -> None:
    before = children()
    test = small(generators=("asyncio",), requests_per_min=6)
    replayed = await run(test)
    assert children() <= before
    told = write(test, replayed, tmp_path / "out", "the command")
    assert told == json.loads(json.dumps(told))
    assert told["faults"] == []
    rows = list(csv.DictReader((tmp_path / "out" / "requests.csv").open()))
    assert len(rows) == 24
    # Six a minute for each of two tenants: the rest is refused, which is no fault where asked for.
    refused = sum(row["failure"] == REFUSED for row in rows)
    assert 0 < refused < 24
    assert told["failures"] == {REFUSED: told["failed"]}
    assert faults(replace(test, requests_per_min=None), replayed) == [
        f"asyncio: {refused} requests: HTTP 429"
    ]
    assert set(told["tiers"]) == {"gpu", "host", "disk"}
    assert sum(told["tiers"].values()) == pytest.approx(1, abs=0.5)
    assert 0 < told["busy"]["replica-0"] < 1
    assert told["prices"]["step_s"] + told["prices"]["prompt_token_s"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Hits by tier" in page
    assert "HTTP 429" in page


@pytest.mark.long
async def test_locust_and_the_asyncio_generator_see_the_same_first_tokens(tmp_path: Path) -> None:
    recipe = Recipe(
        arrivals=240, rate_per_s=8, adapters=6, prompt_tokens_mean=24, prompt_tokens_max=96,
        output_tokens_mean=8, output_tokens_max=16,
    )  # fmt: skip
    test = small(generators=("locust", "asyncio"), trace=tuple(generate(recipe)))  # type: ignore[arg-type]
    told = write(test, await run(test), tmp_path, "the command")
    assert told["faults"] == []
    seen = told["ttft_ms_by_generator"]
    assert seen["locust"]["count"] == seen["asyncio"]["count"]
    assert seen["locust"]["p50"] == pytest.approx(seen["asyncio"]["p50"], rel=0.5, abs=20)
    assert "as each generator saw it" in (tmp_path / "report.html").read_text()
