"""The engine's measurements: their loops lose nothing, and HTTP is that of a real replica."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from replica.core.adapter_cache import AdapterCache, Load
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.core.sequence import Sampling
from replica.core.sequence import Sequence as Request
from replica.core.step import Step
from replica.engine.flight import Landed
from replica.engine.sampler import Drawn
from shared.ids import AdapterId

A = AdapterId("a")


class Runner:
    overlaps = False

    def launch(self, step: Step) -> Landed:
        return Landed({row.seq: Drawn(1) for row in step.rows if row.samples})


class Mover:
    """A load takes two looks."""

    def __init__(self, cache: AdapterCache) -> None:
        self.cache, self.loads, self.looks = cache, 0, 0
        self.loading: Load | None = None

    def begin(self) -> None:
        for command in self.cache.poll(0.0):
            if isinstance(command, Load):
                self.loading, self.loads = command, self.loads + 1

    def arriving(self) -> bool:
        self.looks += 1
        if self.loading is not None and self.looks % 2 == 0:
            load, self.loading = self.loading, None
            self.cache.loaded(load.adapter, load.digest, load.slot)
        self.begin()
        return self.loading is not None


@pytest.mark.parametrize("open_loop", [False, True])
def test_a_loop_measures_every_request_and_knows_who_missed(open_loop: bool) -> None:
    pytest.importorskip("triton")
    from replica.bench.loops import Loop

    pool = PagePool(pages=40, page_tokens=4)
    cache = AdapterCache(slots=1, host_max=1, pool=pool)
    cache.offer(A, "1", 8, 100, 1)
    cache.read(A, "1")
    scheduler = Scheduler(
        pool=pool, cache=cache, max_running=4, max_step_tokens=64, eos_ids=frozenset(),
        max_model_len=60,
    )  # fmt: skip
    sampling = Sampling(max_tokens=3, temperature=0)
    requests = [Request(f"q{i}", A if i % 2 else None, (1, 2, 3), sampling, 0.0) for i in range(6)]
    measured = Loop(
        scheduler=scheduler,
        runner=Runner(),  # type: ignore[arg-type]
        mover=(mover := Mover(cache)),
        is_resident=lambda request: request.adapter is None or cache.slot_of(A) is not None,
        requests=requests,
        concurrency=2,
        arrivals_s=[0.002 * i for i in range(6)] if open_loop else None,
    ).run()
    assert measured.tokens == 18
    assert set(measured.first_s) == {request.id for request in requests}
    assert len(measured.gaps) == 12
    assert "q1" in measured.missed
    assert measured.missed <= {"q1", "q3", "q5"}, "others need none"
    assert open_loop or measured.missed == {"q1"}, "it is resident for those that come later"
    assert mover.loads == 1


def test_the_engine_is_measured_through_a_replicas_own_http(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "http.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "replica.bench.engine", "--http", "--device", "cpu"),
            *("--concurrency", "2", "--mixes", "none,distinct", "--adapters", "2"),
            *("--cache-tokens", "4000", "--step-tokens", "64", "--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["mix"], cell["requests"]) for cell in cells] == [("none", 6), ("distinct", 6)]
    assert all(cell["output_tokens_per_s"] > 0 for cell in cells)
