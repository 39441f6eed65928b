"""A load test's page in a real browser: light and dark, wide and narrow, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from loadtests.contest import Setting, contest
from loadtests.prices import Prices
from loadtests.recipe import Recipe, generate
from loadtests.run_page import run_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = tuple(generate(Recipe(arrivals=800, rate_per_s=40, adapters=80)))
    setting = Setting(trace=trace, replicas=3, prices=Prices(slots=4), config=GatewayConfig())
    ((_, run),) = contest(setting, ["loraplex"])
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(run_page(run, title="A run", notes=["A note."], skip=0.1))
    return file


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_report_is_readable_in_any_scheme_and_width(
    chromium: Any, report: Path, scheme: str, width: int
) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda line: said.append(line.text))
    page.on("request", lambda r: said.append(r.url) if not r.url.startswith("file:") else None)
    page.goto(report.as_uri())
    page.get_by_role("heading", name="A run").wait_for()
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    back, text = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('svg text')).fill]"
    )
    cut = page.evaluate(_CUT)
    page.screenshot(
        path=Path(__file__).parent / "screens" / f"report-{scheme}-{width}.png", full_page=True
    )
    page.close()
    assert said == []
    assert wide <= 0
    assert (light(text) > light(back)) == (scheme == "dark")
    assert cut == []


_CUT = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const frame = svg.getBoundingClientRect()
  return [...svg.querySelectorAll('text')]
    .filter(text => text.textContent)
    .filter(text => {
      const box = text.getBoundingClientRect()
      return box.left < frame.left - 1 || box.right > frame.right + 1
    })
    .map(text => svg.getAttribute('aria-label') + ': ' + text.textContent)
})
"""
"""Texts that reach out of their chart."""


def light(colour: str) -> int:
    """Of `rgb(r, g, b)`."""
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(", "))
