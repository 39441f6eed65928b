"""The engine thread without an engine: real scheduler and cache, memory in dictionaries.

Its model is a hash, and it reads its context the way a real one does: from pages, written under
the weights that lie in the row's slot. So a page given twice, a slot changed under a sequence or a
token fed out of place shows as another text. With a window it reads no further back, and as in a
model of many layers what it writes depends on what it reads: one wrong key spoils all that follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Sequence as Series
from itertools import pairwise
from typing import Any

import pytest

from replica.core.adapter_cache import AdapterCache, Evict, EvictHost, Load
from replica.core.pages import RELEASED, PagePool
from replica.core.scheduler import Progress, Scheduler, Step
from replica.core.segments import segments
from replica.core.sequence import Sampling, Sequence
from replica.core.step import PENDING, Row
from shared.ids import AdapterId
from shared.messages import Tier

Weights = tuple[AdapterId, str] | None  # None: the base


def likeliest(context: Series[int], weights: Weights) -> int:
    return zlib.crc32(repr((list(context), weights)).encode()) % 97


def text(
    prompt: Series[int], weights: Weights, tokens: int, window: int | None = None
) -> list[int]:
    """What a sequence says that nobody disturbs."""
    context = list(prompt)
    keys: list[int] = []
    for _ in range(tokens):
        if window is not None:
            for at in range(len(keys), len(context)):
                keys.append(key(context[at], keys[max(0, at + 1 - window) :], weights))
        context.append(likeliest(context if window is None else keys[-1:], weights))
    return context[len(prompt) :]


def key(token: int, seen: Series[int], weights: Weights) -> int:
    """What is kept of a token, in a base with a window: `seen` are those before it."""
    return zlib.crc32(repr((token, list(seen), weights)).encode())


class EngineThread:
    text = staticmethod(text)

    def __init__(
        self,
        *,
        slots: int = 2,
        host_max: int = 4,
        pages: int = 64,
        page_tokens: int = 4,
        max_running: int = 8,
        max_step_tokens: int = 32,
        max_model_len: int = 1000,
        adapter_pages_max: int | None = None,
        eos_ids: frozenset[int] = frozenset(),
        adapter_wait_s: float = 5.0,
        window: int | None = None,
    ) -> None:
        self.now = 0.0
        self.pool = PagePool(pages=pages, page_tokens=page_tokens, window=window)
        self.cache = AdapterCache(
            slots=slots, host_max=host_max, pool=self.pool, pages_max=adapter_pages_max
        )
        self.max_step_tokens, self.max_running = max_step_tokens, max_running
        self.scheduler = Scheduler(
            pool=self.pool,
            cache=self.cache,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            eos_ids=eos_ids,
            max_model_len=max_model_len,
            adapter_wait_s=adapter_wait_s,
            mixed_step_ratio=3.0,
        )
        self.memory: dict[tuple[int, int], tuple[int, Weights]] = {}
        self.slots: dict[int, tuple[AdapterId, str]] = {}
        self.weights: dict[int, tuple[AdapterId, str]] = {}  # by page: what an adapter put there
        self.loads: list[Load] = []
        self.sequences: dict[str, Sequence] = {}
        self.ends: list[Progress] = []
        self.flight: tuple[Step, dict[str, int]] | None = None

    def offer(self, *names: str, digest: str = "v1", pages: int = 0) -> None:
        for name in names:
            self.cache.offer(AdapterId(name), digest, 8, 1000, pages)

    def add(
        self,
        adapter: str | None = None,
        prompt: Series[int] = (1, 2, 3),
        tokens: int = 4,
        salt: str = "",
        **wishes: Any,
    ) -> Sequence:
        name = None if adapter is None else AdapterId(adapter)
        sampling = Sampling(max_tokens=tokens, temperature=0.0, **wishes)
        seq_id = f"s{len(self.sequences)}"
        seq = Sequence(seq_id, name, tuple(prompt), sampling, self.now, salt=salt)
        self.scheduler.add(seq, self.now)
        self.sequences[seq.id] = seq
        return seq

    def carry_out(self) -> None:
        """What the cache wants done; loads begin, and end when told to."""
        for command in self.cache.poll(self.now):
            match command:
                case Load():
                    assert command.slot not in self.slots, "loads into a slot that is not empty"
                    self.loads.append(command)
                case Evict(adapter, slot):
                    assert self.slots.pop(slot, (adapter, ""))[0] == adapter
                case EvictHost():
                    pass

    def end_load(self, index: int = 0, *, fails: bool = False) -> None:
        load = self.loads.pop(index)
        if fails:
            self.cache.load_failed(load.adapter, load.digest, load.slot, "the disk is on fire")
            return
        if load.tier is Tier.DISK:
            self.cache.read(load.adapter, load.digest)
        self.slots[load.slot] = (load.adapter, load.digest)
        for page in self.cache.pages_in(load.slot):
            self.weights[page] = (load.adapter, load.digest)
        self.cache.loaded(load.adapter, load.digest, load.slot)

    def run(self, step: Step) -> dict[str, int]:
        """One forward pass; every law of a step is checked on the way."""
        assert 0 < step.total_tokens <= self.max_step_tokens
        assert len({row.seq for row in step.rows}) == len(step.rows) <= self.max_running
        laid = segments(step)
        real = [slot for slot in laid.slots if slot >= 0]
        assert len(real) == len(set(real)), "rows of one slot are apart"
        assert all(a < b for a, b in pairwise(laid.starts))
        drawn: dict[str, int] = {}
        for row in step.rows:
            weights = self.slots[row.slot] if row.slot >= 0 else None
            if weights is not None:
                found = {self.weights[page] for page in self.cache.pages_in(row.slot)}
                assert found <= {weights}, "others wrote where its weights were"
            size = self.pool.page_tokens
            tokens = row.tokens
            if tokens == (PENDING,):  # the device knows what the step before drew
                assert self.flight is not None
                tokens = (self.flight[1][row.seq],)
            for at, token in enumerate(tokens, start=row.start):
                page = row.pages[at // size]
                assert page != RELEASED, "it writes where it has no page"
                self.weights.pop(page, None)
                kept = token
                if self.pool.window is not None:
                    seen = self._read(row, at + 1 - self.pool.window, at)
                    kept = key(token, [each for each, _ in seen], weights)
                self.memory[page, at % size] = (kept, weights)
            context = self._read(row, 0 if self.pool.window is None else row.end - 1, row.end)
            assert {used for _, used in context} == {weights}, "keys of other weights in its pages"
            if row.samples:
                pending = self.flight is not None and row.seq in self.flight[1]
                live = self.sequences[row.seq].finish is None
                assert not live or row.drawn == len(self.sequences[row.seq].output) + pending
                drawn[row.seq] = likeliest([token for token, _ in context], weights)
        return drawn

    def _read(self, row: Row, start: int, end: int) -> list[tuple[int, Weights]]:
        places = [divmod(at, self.pool.page_tokens) for at in range(max(0, start), end)]
        return [self.memory[row.pages[page], at] for page, at in places]

    def turn(self, *, loads: bool = True) -> Step | None:
        """Once around the loop."""
        self.now += 1.0
        self.land()
        self.carry_out()
        while loads and self.loads:
            self.end_load()
        step = self.scheduler.plan(self.now)
        self.ends += self.scheduler.collect()
        if step is not None:
            self.ends += [
                progress
                for progress in self.scheduler.commit(step, self.run(step), self.now)
                if progress.finish is not None
            ]
        return step

    def turn_ahead(self, meanwhile: Callable[[], None] = lambda: None) -> Step | None:
        """Once around the loop of a driver whose device runs one step while the next is planned,
        and whose thread is lent out while it waits for the first."""
        self.now += 1.0
        self.carry_out()
        step = self.scheduler.plan(self.now)
        self.ends += self.scheduler.collect()
        flight = None if step is None else (step, self.run(step))
        if step is not None:
            self.scheduler.advance(step)
        meanwhile()
        self.carry_out()
        self.land()
        self.flight = flight
        return step

    def land(self) -> None:
        """Settle the step under way."""
        if self.flight is not None:
            step, drawn = self.flight
            self.flight = None
            settled = self.scheduler.settle(step, drawn, self.now)
            self.ends += [progress for progress in settled if progress.finish is not None]

    def until_all_end(self, turns: int = 10_000) -> int:
        for taken in range(turns):
            if self.scheduler.running + self.scheduler.waiting == 0:
                return taken
            self.turn()
        raise AssertionError(f"still running after {turns} turns")


@pytest.fixture(scope="session")
def engine_thread() -> type[EngineThread]:
    return EngineThread
