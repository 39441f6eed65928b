from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from loadtests.__main__ import app
from loadtests.chart import bars, lines, page, table
from loadtests.lesson import SETTINGS, Lesson, hits
from loadtests.recipe import Recipe, generate
from loadtests.trace import write

LESSON = """\
GPU slots  host slots  GPU hit  host hit  disk loads  mean wait
        8         100   29.6%    44.4%       12968   32.46 ms
       32         100   54.5%    19.1%       13187   32.22 ms
       32         500   54.5%    44.5%         500    2.54 ms
      128         500   78.2%    20.8%         500    1.83 ms
"""


def test_the_lesson_on_caches_prints_the_table_that_the_field_knows() -> None:
    done = CliRunner().invoke(app, ["lesson", "cache"])
    assert done.exit_code == 0
    assert LESSON in done.stdout


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
def test_more_host_slots_never_cost_a_disk_load(gpu: int, host: int, more: int) -> None:
    lesson = Lesson(adapters=40, requests=500)
    small = hits(lesson, gpu_slots=gpu, host_slots=host)
    large = hits(lesson, gpu_slots=gpu, host_slots=host + more)
    assert large.disk_loads <= small.disk_loads
    assert large.gpu_hit == small.gpu_hit


def test_a_host_tier_of_the_working_set_reads_each_adapter_once() -> None:
    lesson = Lesson()
    for gpu, host in SETTINGS:
        if host >= lesson.adapters:
            assert hits(lesson, gpu_slots=gpu, host_slots=host).disk_loads == lesson.adapters


numbers = st.floats(-1e12, 1e12) | st.sampled_from([math.nan, math.inf, -math.inf])


@given(st.lists(st.tuples(numbers, numbers), max_size=20), st.booleans(), st.booleans(), st.text())
def test_a_chart_of_anything_is_well_formed(
    points: list[tuple[float, float]], log_x: bool, log_y: bool, name: str
) -> None:
    name = "".join(c for c in name if c.isprintable())
    drawn = lines(name, {name: points, "other": []}, x="x", y="y", log_x=log_x, log_y=log_y)
    ET.fromstring(drawn)
    assert "nan" not in drawn.replace(name, "")


def test_a_page_holds_what_it_was_given_and_asks_nobody_for_anything() -> None:
    text = page(
        "a < b", {"s": [table([{"x": 1.5, "y": "<i>"}], ["x", "y"]), bars("b", {"k": 2}, y="n")]}
    )
    assert "<i>" not in text
    assert "a &lt; b" in text
    found: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value or "" for key, value in attrs if key in ("src", "href"))

    Links().feed(text)
    assert found == []


def test_a_described_trace_gets_its_page(tmp_path: Path) -> None:
    write(generate(Recipe(arrivals=300)), tmp_path / "t.jsonl")
    html = tmp_path / "t.html"
    asked = ["trace", "describe", str(tmp_path / "t.jsonl"), "--html", str(html)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert html.read_text().count("<svg") == 5
