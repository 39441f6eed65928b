"""The small benchmark runs: both proxies answer every kind of load, and its figures are figures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from loadtests.bench.load import requests
from loadtests.bench_gateway import cpu_s, measure

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="CPU is counted as Linux keeps it, in /proc"
)


async def test_every_load_is_measured_on_both_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    figures = await measure(0.3)
    assert figures.keys() == {"splice", "gateway"}
    for loads in figures.values():
        assert loads.keys() == {"json", "sse", "paced50", "paced200"}
        assert all(0 < load["cpu_us"] < 1e6 for load in loads.values())


def test_the_load_is_the_same_for_everyone() -> None:
    assert requests("json", "key") == requests("json", "key")
    assert requests("json", "key", seed=2) != requests("json", "key")


def test_cpu_is_counted_while_we_work() -> None:
    before = cpu_s(os.getpid())
    sum(range(3_000_000))
    assert cpu_s(os.getpid()) > before
