"""The bench of a replica measures a real vLLM beside it, on the real base."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from vllm_pool import PYTHON, ROOT

from loadtests.bench_replica import Bench, Figures

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


async def test_each_batch_of_the_base_is_measured_on_both_sides(
    real_base: Path, real_adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PYTHON.exists(), "its environment is made by `make test-vllm`"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found: list[Figures] = []
    cores = os.cpu_count() or 1
    bench = Bench(real_base, real_adapters, ["pirate", "shout"], 3, cores, found.append)
    await bench.measure([1], 1, peft=False, vllm=PYTHON)
    measured = [(row.side, row.adapters, row.batch, row.tokens) for row in found]
    assert measured == [("loraplex", 0, 1, 3), ("vllm", 0, 1, 3), ("loraplex", 2, 1, 3)]
    for row in found:
        assert min(row.wall_s, row.cpu_s, row.cpu_ms, row.tokens_s) > 0, row.side
        assert 0 <= row.foreign <= 1.1
