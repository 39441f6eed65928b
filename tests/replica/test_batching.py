"""`loraplex lesson batching`: the figures that the field knows, and that both ways are one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from replica.bench.batching import Setting, app, lesson


def test_the_lesson_on_batching_has_the_figures_that_the_field_knows() -> None:
    told = lesson(Setting())
    assert told["distinct"] == 34
    assert f"{100 * told['extra_flops_share']:.2f} %" == "1.56 %"
    assert f"{told['adapter_bytes'] / 1e6:.2f}" == "0.13"
    assert f"{told['base_bytes'] / 1e6:.1f}" == "8.4"
    assert told["same_outputs"]
    assert 0 < told["gathered_ms"] < told["merged_ms"]


@pytest.mark.parametrize(("rank", "batch", "adapters"), [(1, 1, 1), (33, 7, 3), (8, 40, 50)])
def test_merged_and_gathered_agree_whatever_the_ranks_and_rows(
    rank: int, batch: int, adapters: int
) -> None:
    told = lesson(Setting(width=256, rank=rank, batch=batch, adapters=adapters))
    assert told["same_outputs"]
    assert told["distinct"] <= min(batch, adapters)


def test_it_prints_for_people_and_refuses_a_width_that_has_no_heads() -> None:
    said = CliRunner().invoke(app, ["--width", "256", "--batch", "8"])
    assert said.exit_code == 0
    assert "give the same outputs" in said.stdout
    wrong = CliRunner().invoke(app, ["--width", "300"])
    assert wrong.exit_code == 2
    assert "multiple of 128" in wrong.stderr


def test_the_lessons_program_passes_it_on() -> None:
    words = [sys.executable, "-m", "loadtests", "lesson", "batching", "--width", "256", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["distinct"] == 34
