"""What goes to other people's benchmarks and what is kept of their answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from loadtests.convert import Conversion, convert
from loadtests.foreign.aiperf import mooncake, summary
from loadtests.foreign.environment import NotInstalled, environment
from loadtests.recipe import Recipe, generate


def test_a_trace_as_mooncakes_is_read_back_with_its_lengths(tmp_path: Path) -> None:
    trace = tuple(generate(Recipe(arrivals=60, rate_per_s=2)))
    (tmp_path / "trace.jsonl").write_bytes(mooncake(trace))
    back = convert(tmp_path / "trace.jsonl", Conversion())
    assert Counter((r.prompt_tokens, r.output_tokens) for r in back) == Counter(
        (r.prompt_tokens, r.output_tokens) for r in trace
    )


def test_the_summary_keeps_times_counts_and_every_error() -> None:
    told = {
        "time_to_first_token": {"unit": "ms", "avg": 1.5, "p50": 1, "p90": 2, "p99": 3, "max": 4},
        "request_count": {"unit": "requests", "avg": 60},
        "error_summary": [{"error_details": {"code": 503}, "count": 2}],
        "input_config": {"much": "else"},
    }
    kept = summary(told)
    assert kept["time_to_first_token"]["p99"] == 3
    assert kept["request_count"] == 60
    assert kept["errors"][0]["count"] == 2
    assert "input_config" not in kept
    assert summary({})["errors"] == []


def test_an_environment_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / ".done").write_text("")
    assert asyncio.run(environment(tmp_path, "no-such-package-for-certain")) == tmp_path / "bin"


@pytest.mark.long
async def test_pips_own_words_say_why_an_environment_was_not_made(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="nvalid requirement"):
        await environment(tmp_path / "env", "not a requirement!")
    assert not (tmp_path / "env" / ".done").exists()
