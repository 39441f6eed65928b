"""The pipeline: the same texts whether a step is planned ahead or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from replica.core.adapter_cache import AdapterCache
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.core.sequence import Finish, Sampling
from replica.core.sequence import Sequence as Request
from replica.core.step import PENDING, Row, Step
from replica.engine.flight import Arrival, Flight
from replica.engine.host_adapter import HostAdapter
from replica.engine.runner import Runner
from replica.engine.sampler import Drawn
from replica.engine.tiny import tiny_model
from replica.pipeline import Pipeline
from shared.clock import monotonic

PAGES, PAGE_TOKENS = 40, 16


class Ahead:
    """The reference engine behind the promises of a device: it takes steps whose tokens it has to
    know from the step before, and tells what it drew when it is asked."""

    overlaps = True

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._drawn: dict[str, int] = {}
        self.under_way = 0
        self.most = 0

    def launch(self, step: Step) -> Flight:
        drawn = self._runner.run_with_logprobs(Step(tuple(map(self._fed, step.rows))))
        self._drawn = {seq: each.token for seq, each in drawn.items()}
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return _Later(self, drawn)

    def pages_of(self, adapter: HostAdapter) -> int:
        return self._runner.pages_of(adapter)

    def load(self, slot: int, adapter: HostAdapter, pages: Sequence[int]) -> Arrival | None:
        return self._runner.load(slot, adapter, pages)

    def clear(self, slot: int) -> None:
        self._runner.clear(slot)

    def _fed(self, row: Row) -> Row:
        if row.tokens != (PENDING,):
            return row
        return row._replace(tokens=(self._drawn[row.seq],))


class _Later:
    def __init__(self, runner: Ahead, drawn: dict[str, Drawn]) -> None:
        self._runner, self._drawn = runner, drawn

    def collect(self) -> dict[str, Drawn]:
        self._runner.under_way -= 1
        return self._drawn


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("base")
    tiny_model(folder)
    return Runner(base_dir=folder, slots=1, max_rank=8, pages=PAGES, page_tokens=PAGE_TOKENS)


def _texts(runner: Runner | Ahead, requests: list[Request]) -> dict[str, tuple[list[int], Finish]]:
    pool = PagePool(pages=PAGES, page_tokens=PAGE_TOKENS)
    scheduler = Scheduler(
        pool=pool,
        cache=AdapterCache(slots=1, host_max=1, pool=pool),
        max_running=4,
        max_step_tokens=12,
        eos_ids=frozenset(),
        max_model_len=200,
    )
    pipeline = Pipeline(scheduler=scheduler, runner=runner, clock=monotonic)
    for request in requests:
        scheduler.add(request, 0.0)
    while scheduler.running + scheduler.waiting or pipeline.busy:
        pipeline.turn()
        scheduler.check()
    assert pool.available == pool.pages
    ends = {}
    for request in requests:
        assert request.finish is not None
        ends[request.id] = (request.output, request.finish)
    return ends


def _requests(stop: int | None) -> list[Request]:
    stops = frozenset() if stop is None else frozenset({stop})
    wishes = [
        Sampling(max_tokens=9, temperature=0, stop_token_ids=stops),
        Sampling(max_tokens=1, temperature=0),
        Sampling(max_tokens=12, temperature=0.8, seed=4),
        Sampling(max_tokens=7, temperature=0, presence_penalty=1.5),
        Sampling(max_tokens=5, temperature=0, logprobs=1),
    ]
    return [
        Request(f"q{i}", None, tuple(range(3 + i, 23 + 2 * i)), sampling, 0.0)
        for i, sampling in enumerate(wishes)
    ]


def test_planning_ahead_changes_no_text(reference: Runner) -> None:
    alone = _texts(reference, _requests(None))
    stop = alone["q0"][0][3]
    ahead = Ahead(reference)
    assert _texts(ahead, _requests(None)) == alone
    assert ahead.most == 2, "one step under way while the next is launched"
    assert _texts(Ahead(reference), _requests(stop)) == _texts(reference, _requests(stop))
