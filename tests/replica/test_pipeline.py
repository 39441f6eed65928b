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
        self._looks = 0

    def landed(self) -> bool:
        self._looks += 1
        return self._looks > 2

    def collect(self) -> dict[str, Drawn]:
        self._runner.under_way -= 1
        return self._drawn


@pytest.fixture(scope="module", params=["llama", "mistral"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("base")
    tiny_model(folder, family=request.param)
    return Runner(base_dir=folder, slots=1, max_rank=8, pages=PAGES, page_tokens=PAGE_TOKENS)


def _texts(
    runner: Runner | Ahead, requests: list[Request], window: int | None = None
) -> dict[str, tuple[list[int], Finish]]:
    pool = PagePool(pages=PAGES, page_tokens=PAGE_TOKENS, window=window)
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
        Request(f"q{i}", None, tuple(range(3 + i, 43 + 2 * i)), sampling, 0.0)
        for i, sampling in enumerate(wishes)
    ]


def test_planning_ahead_changes_no_text(reference: Runner) -> None:
    """Nor do pages that a window has passed, though the step under way still names them."""
    alone, window = _texts(reference, _requests(None)), reference.config.window
    stop = alone["q0"][0][3]
    ahead = Ahead(reference)
    assert _texts(ahead, _requests(None), window) == alone
    assert ahead.most == 2, "one step under way while the next is launched"
    stopped = _texts(Ahead(reference), _requests(stop), window)
    assert stopped == _texts(reference, _requests(stop))


class Device:
    """Steps of a fixed time, one after another, beside a clock that moves when it is waited for."""

    overlaps = True
    STEP_S = 0.01

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.launched_at: list[float] = []

    def clock(self) -> float:
        return self.now

    def launch(self, step: Step) -> Flight:
        self.launched_at.append(self.now)
        self.free_at = max(self.free_at, self.now) + self.STEP_S
        return _Until(self, self.free_at, {row.seq: Drawn(1) for row in step.rows})


class _Until:
    def __init__(self, device: Device, at: float, drawn: dict[str, Drawn]) -> None:
        self._device, self._at, self._drawn = device, at, drawn

    def landed(self) -> bool:
        return self._device.now >= self._at

    def collect(self) -> dict[str, Drawn]:
        assert self.landed(), "the thread is never held by the device"
        return self._drawn


class Held:
    """A pipeline over a device, in which adapters arrive when a test says so."""

    def __init__(self) -> None:
        self.device, self.arrives_at = Device(), 0.0
        self.during: list[Request] = []
        pool = PagePool(pages=PAGES, page_tokens=PAGE_TOKENS)
        self.scheduler = Scheduler(
            pool=pool, cache=AdapterCache(slots=1, host_max=1, pool=pool), max_running=4,
            max_step_tokens=64, eos_ids=frozenset(), max_model_len=400,
        )  # fmt: skip
        self.pipeline = Pipeline(
            scheduler=self.scheduler, runner=self.device, clock=self.device.clock,  # type: ignore[arg-type]
            meanwhile=self._meanwhile, arriving=lambda: self.device.now < self.arrives_at,
        )  # fmt: skip
        self.scheduler.add(_request("first"), 0.0)
        for _ in range(12):  # what a step takes is known by then
            self.pipeline.turn()

    def _meanwhile(self, seconds: float) -> None:
        self.device.now += seconds
        while self.during:
            self.scheduler.add(self.during.pop(), self.device.now)

    def next_launch(self) -> float:
        """How long after the landing of the step before."""
        landed_at = self.device.now
        self.pipeline.turn()
        return self.device.launched_at[-1] - landed_at


def _request(name: str) -> Request:
    return Request(name, None, (1, 2, 3), Sampling(max_tokens=300, temperature=0), 0.0)


def test_a_step_is_planned_at_once_where_nothing_is_on_its_way() -> None:
    assert Held().next_launch() == 0


def test_it_is_planned_late_but_in_time_while_an_adapter_is_on_its_way() -> None:
    held = Held()
    held.arrives_at = held.device.now + 1
    for _ in range(5):
        assert 0.5 * Device.STEP_S < held.next_launch() < Device.STEP_S
    assert held.device.free_at - held.device.now <= Device.STEP_S * 1.05, "it was never idle"
    held.arrives_at = held.device.now + 0.003
    assert 0.003 <= held.next_launch() < 0.004, "planned as soon as it is there"


def test_who_comes_while_a_step_is_waited_for_is_in_the_next_plan() -> None:
    held = Held()
    held.during = [_request("second")]
    held.pipeline.turn()
    turn = held.pipeline.turn()
    assert turn.started is not None
    assert {row.seq for row in turn.started.rows} == {"first", "second"}
