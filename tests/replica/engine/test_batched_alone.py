"""Scheduler, cache, pages and forward pass together, in float32, token by token: whatever runs
beside a sequence, whoever gives way, leaves, or computed its prompt before it, it says what it says
alone. Where the base has a window, pages are given back as it moves on, and alone all are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.core.adapter_cache import AdapterCache, Evict, Load
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.core.sequence import Finish, Sampling, Sequence
from replica.engine.adapter_store import AdapterFolder, HostAdapter
from replica.engine.runner import Runner
from replica.engine.tiny import tiny_adapter, tiny_model
from shared.ids import AdapterId

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANKS = {"one": 1, "eight": 8, "odd": 37, "huge": 256}
PAGES, SLOTS, MAX_LEN = 76, 3, 96
BEGINNINGS = ([], list(range(3, 20)), list(range(3, 40)))
"""Prompts begin with one of these: they share whole pages, and the middle of one."""


@dataclass(frozen=True)
class Wish:
    adapter: str | None
    prompt: tuple[int, ...]
    temperature: float
    tokens: int
    n: int = 1
    leaves_after: int | None = None  # turns


class Bench:
    """A replica's core and engine, without its shell."""

    def __init__(
        self, runner: Runner, hosts: Mapping[str, HostAdapter], window: int | None = None
    ) -> None:
        self.runner = runner
        self.hosts = hosts
        self.pool = PagePool(pages=PAGES, page_tokens=16, window=window)
        self.cache = AdapterCache(
            slots=SLOTS, host_max=SLOTS, pool=self.pool, pages_max=PAGES - MAX_LEN // 16
        )
        for name, host in hosts.items():
            self.cache.offer(
                AdapterId(name), host.digest, host.rank, host.size_bytes, runner.pages_of(host)
            )
        self.scheduler = Scheduler(
            pool=self.pool,
            cache=self.cache,
            max_running=6,
            max_step_tokens=24,
            eos_ids=frozenset(),
            max_model_len=MAX_LEN,
            adapter_wait_s=5.0,
        )
        self.now = 0.0
        self.preempted = 0
        self.shared = 0

    def turn(self) -> None:
        self.now += 1.0
        for command in self.cache.poll(self.now):
            match command:
                case Load(name, digest, slot):
                    self.runner.load(slot, self.hosts[name], self.cache.pages_in(slot))
                    self.cache.read(name, digest)
                    self.cache.loaded(name, digest, slot)
                case Evict(_, slot):
                    self.runner.clear(slot)
        step = self.scheduler.plan(self.now)
        if step is not None:
            self.scheduler.commit(step, self.runner.run(step), self.now)
        self.scheduler.check()

    def run(self, wishes: list[Wish], pauses: list[int]) -> list[Sequence]:
        """Turns in between as `pauses` say; those who leave do so at their time."""
        live: dict[str, tuple[Sequence, int | None]] = {}
        made: list[Sequence] = []
        for wish, pause in zip(wishes, pauses, strict=True):
            for choice in range(wish.n):
                sampling = Sampling(wish.tokens, wish.temperature, seed=choice)
                name = None if wish.adapter is None else AdapterId(wish.adapter)
                seq = Sequence(f"{len(made)}", name, wish.prompt, sampling, self.now)
                self.scheduler.add(seq, self.now)
                made.append(seq)
                live[seq.id] = seq, wish.leaves_after
            for _ in range(pause):
                self._turn_and_leave(live)
        turns = 0
        while any(seq.finish is None for seq in made):
            self._turn_and_leave(live)
            turns += 1
            assert turns < 5000, "they do not end"
        self.preempted = sum(seq.preemptions for seq in made)
        self.shared = sum(seq.cached for seq in made)
        assert self.pool.available + self.cache.pages_used == PAGES
        return made

    def _turn_and_leave(self, live: dict[str, tuple[Sequence, int | None]]) -> None:
        self.turn()
        for seq_id, (seq, left) in list(live.items()):
            if left == 0:
                self.scheduler.abort(seq_id, Finish.ABORT, self.now)
            if left == 0 or seq.finish is not None:
                del live[seq_id]
            elif left is not None:
                live[seq_id] = seq, left - 1


@pytest.fixture(scope="module", params=["llama", "mistral"])
def hosts_and_runners(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, HostAdapter], Runner, Runner]:
    folder: Path = tmp_path_factory.mktemp("together")
    config = tiny_model(folder / "base", seed=4, family=request.param)
    for seed, (name, rank) in enumerate(RANKS.items()):
        targets = EVERY if rank < 100 else ("q_proj", "v_proj")
        tiny_adapter(folder / "adapters" / name, config, seed, r=rank, targets=targets)
    store = AdapterFolder(folder / "adapters", 256, config)
    hosts = {name: store.read(AdapterId(name)) for name in RANKS}
    runners = (
        Runner(base_dir=folder / "base", slots=SLOTS, max_rank=256, pages=PAGES, threads=1)
        for _ in range(2)
    )
    return hosts, *runners


WISHES = st.builds(
    Wish,
    adapter=st.none() | st.sampled_from(sorted(RANKS)),
    prompt=st.builds(
        lambda beginning, end: (*beginning, *end),
        st.sampled_from(BEGINNINGS),
        st.lists(st.integers(3, 260), min_size=1, max_size=6),
    ),
    temperature=st.sampled_from([0.0, 0.8]),
    tokens=st.integers(1, 30),
    n=st.sampled_from([1, 1, 4]),
    leaves_after=st.none() | st.integers(0, 12),
)


@settings(max_examples=12)
@given(wishes=st.lists(WISHES, min_size=2, max_size=8), data=st.data())
def test_everybody_says_what_he_says_alone(
    hosts_and_runners: tuple[dict[str, HostAdapter], Runner, Runner],
    wishes: list[Wish],
    data: st.DataObject,
) -> None:
    hosts, busy, calm = hosts_and_runners
    pauses = data.draw(st.lists(st.integers(0, 4), min_size=len(wishes), max_size=len(wishes)))

    @cache
    def alone(adapter: AdapterId | None, prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
        wish = Wish(adapter, prompt, sampling.temperature, sampling.max_tokens)
        bench = Bench(calm, hosts)
        seq = Sequence("alone", adapter, wish.prompt, sampling, 0.0)
        bench.scheduler.add(seq, 0.0)
        while seq.finish is None:
            bench.turn()
        return list(seq.output)

    for seq in Bench(busy, hosts, busy.config.window).run(wishes, pauses):
        expected = alone(seq.adapter, seq.prompt, seq.sampling)
        assert seq.output == expected[: len(seq.output)]
        if seq.finish is not Finish.ABORT:
            assert len(seq.output) == len(expected)


def test_that_happens_under_preemption_eviction_and_shared_prompts(
    hosts_and_runners: tuple[dict[str, HostAdapter], Runner, Runner],
) -> None:
    """The law above would be empty if nothing of this ever happened."""
    hosts, busy, _ = hosts_and_runners
    bench = Bench(busy, hosts, busy.config.window)
    wishes = [
        Wish(adapter, (*BEGINNINGS[2], end), 0.0, 40)
        for end, adapter in enumerate(["huge", "one", "eight", None, *RANKS, None], start=100)
    ]
    bench.run(wishes, [0] * len(wishes))
    assert (bench.preempted > 0) == (busy.config.window is None), "windows want fewer pages"
    assert bench.shared > 0
    pages = {name: bench.runner.pages_of(host) for name, host in hosts.items()}
    assert sum(pages.values()) > PAGES - MAX_LEN // 16, "they do not fit all at once"
    assert max(pages.values()) > 10 * min(pages.values())
