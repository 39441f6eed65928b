"""The bench of a replica, on a tiny base: every figure is there, and adds up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from loadtests.bench_replica import Bench, Figures

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="CPU is counted as Linux keeps it, in /proc"
)


async def test_a_round_measures_base_and_mixed_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    from replica.engine.tiny import tiny_adapter, tiny_model

    config = tiny_model(tmp_path / "base")
    names = ["ada", "bob"]
    for seed, name in enumerate(names):
        tiny_adapter(tmp_path / "adapters" / name, config, seed)
    found: list[Figures] = []
    bench = Bench(tmp_path / "base", tmp_path / "adapters", names, 5, 1, found.append)
    await bench.measure([1, 4], 1, peft=False)
    assert [(row.adapters, row.batch) for row in found] == [(0, 1), (0, 4), (2, 1), (2, 4)]
    for row in found:
        assert row.tokens == 5 * row.batch
        assert row.side == "loraplex"
        assert min(row.wall_s, row.cpu_s, row.cpu_ms, row.tokens_s) > 0
        assert 0 <= row.foreign <= 1.1
