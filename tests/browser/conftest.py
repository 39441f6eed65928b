"""A fleet to look at, and a real Chromium to look with; without one these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from local_fleet import RunningFleet, running

_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """Two replicas of four slots, eleven tiny adapters: slots must change hands."""
    from replica.engine.tiny import tiny_adapter, tiny_model

    folder = tmp_path_factory.mktemp("console")
    config = tiny_model(folder / "base", context=4096)
    for number in range(11):
        tiny_adapter(folder / "adapters" / f"tuned-{number}", config, seed=number)
    with running(folder / "data", folder / "base", folder / "adapters") as fleet:
        yield fleet


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="make console-test installs it")
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    if binary is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=_FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, fleet: RunningFleet) -> Iterator[Any]:
    """A fresh page that fails its test on any error the browser reports or request that leaves."""
    page = chromium.new_page(viewport={"width": 1280, "height": 860})
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    page.on("request", lambda r: said.append(r.url) if not r.url.startswith(fleet.url) else None)
    yield page
    page.close()
    assert [line for line in said if "401" not in line] == []
