"""The scheduler under any interleaving: whatever happens around it, a sequence says what it would
say alone, and ends once."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from replica.core.pages import PagePool
from replica.core.sequence import Finish
from shared.ids import AdapterId

NAMES = st.sampled_from("abcd")


def make_machine(engine_thread: Any) -> type[RuleBasedStateMachine]:
    """The machine, over the engine thread of conftest.py."""

    class Scheduling(RuleBasedStateMachine):
        @initialize(
            slots=st.integers(1, 3),
            pages=st.integers(4, 16),
            page_tokens=st.integers(1, 4),
            max_running=st.integers(1, 5),
            more_tokens=st.integers(0, 8),
            for_adapters=st.integers(0, 10),
            window=st.none() | st.integers(1, 9),
        )
        def begin(
            self,
            slots: int,
            pages: int,
            page_tokens: int,
            max_running: int,
            more_tokens: int,
            for_adapters: int,
            window: int | None,
        ) -> None:
            """Beside `for_adapters` pages the longest sequence fits, and all pages are shared."""
            step = max_running + more_tokens
            beside = PagePool(pages=pages, page_tokens=page_tokens, window=window)
            self.thread = engine_thread(
                slots=slots,
                pages=pages + for_adapters,
                page_tokens=page_tokens,
                max_model_len=beside.longest(64, step, pages),
                adapter_pages_max=for_adapters,
                max_running=max_running,
                max_step_tokens=step,
                window=window,
            )
            self.aborted: set[str] = set()
            self.versions = 0

        @rule(name=NAMES, new=st.booleans(), pages=st.integers(0, 6))
        def offer(self, name: str, new: bool, pages: int) -> None:
            self.versions += new
            self.thread.offer(name, digest=f"{name}{self.versions}", pages=pages)

        @rule(name=NAMES, on=st.booleans())
        def pin(self, name: str, on: bool) -> None:
            with suppress(ValueError):
                self.thread.cache.pin(AdapterId(name), on)

        @rule(name=NAMES, refused=st.booleans())
        def lose(self, name: str, refused: bool) -> None:
            if refused:
                self.thread.cache.failed(AdapterId(name), "torn")
            else:
                self.thread.cache.withdraw(AdapterId(name))

        @rule(
            name=st.none() | NAMES,
            prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
            tokens=st.integers(1, 12),
            salt=st.sampled_from(["", "mine"]),
            times=st.integers(1, 3),
        )
        def add(
            self,
            name: str | None,
            prompt: list[int],
            tokens: int,
            salt: str,
            times: int,
        ) -> None:
            """Prompts of two tokens, that begin alike often; `times` is what `n` asks for."""
            if len(prompt) < self.thread.scheduler.max_model_len:
                for _ in range(times):
                    self.thread.add(name, prompt, tokens, salt=salt)

        @rule(data=st.data(), times=st.integers(1, 2))
        def abort(self, data: st.DataObject, times: int) -> None:
            if self.thread.sequences:
                seq = data.draw(st.sampled_from(sorted(self.thread.sequences)))
                live = self.thread.sequences[seq].finish is None
                ended = [
                    self.thread.scheduler.abort(seq, now=self.thread.now) for _ in range(times)
                ]
                assert ended == [live, False][:times]
                if live:
                    self.aborted.add(seq)

        @rule(times=st.integers(1, 4))
        def turn(self, times: int) -> None:
            for _ in range(times):
                self.thread.turn(loads=False)
                self.thread.scheduler.check()

        @rule(times=st.integers(1, 4))
        def turn_ahead(self, times: int) -> None:
            for _ in range(times):
                self.thread.turn_ahead()
                self.thread.scheduler.check()

        @rule(data=st.data())
        def abort_while_two_steps_run(self, data: st.DataObject) -> None:
            self.thread.turn_ahead()
            self.thread.turn_ahead(lambda: self.abort(data, 1))
            self.thread.scheduler.check()

        @rule(data=st.data())
        def abort_while_a_step_runs(self, data: st.DataObject) -> None:
            self.thread.land()
            self.thread.carry_out()
            step = self.thread.scheduler.plan(self.thread.now)
            self.thread.ends += self.thread.scheduler.collect()
            if step is None:
                return
            drawn = self.thread.run(step)
            self.abort(data, 1)
            for progress in self.thread.scheduler.commit(step, drawn, self.thread.now):
                assert progress.seq not in self.aborted
                if progress.finish is not None:
                    self.thread.ends.append(progress)

        @rule()
        def lose_a_step(self) -> None:
            self.thread.carry_out()
            self.thread.scheduler.plan(self.thread.now)

        @precondition(lambda self: self.thread.loads)
        @rule(data=st.data(), fails=st.booleans())
        def end_load(self, data: st.DataObject, fails: bool) -> None:
            loads = len(self.thread.loads)
            self.thread.end_load(data.draw(st.integers(0, loads - 1)), fails=fails)

        @invariant()
        def it_accuses_itself_of_nothing(self) -> None:
            if hasattr(self, "thread"):
                self.thread.scheduler.check()

        @invariant()
        def every_text_is_what_it_would_be_alone(self) -> None:
            for seq in self.thread.sequences.values() if hasattr(self, "thread") else ():
                weights = None if seq.adapter is None else (seq.adapter, seq.digest)
                window = self.thread.pool.window
                assert seq.output == self.thread.text(seq.prompt, weights, len(seq.output), window)

        def teardown(self) -> None:
            if not hasattr(self, "thread"):
                return
            thread = self.thread
            thread.until_all_end()
            thread.ends += thread.scheduler.collect()
            assert thread.pool.available == thread.pool.pages - thread.cache.pages_used
            assert sum(state.running for state in thread.cache.states()) == 0
            reported = [progress.seq for progress in thread.ends]
            assert len(reported) == len(set(reported)), "an end was reported twice"
            assert {*reported, *self.aborted} == thread.sequences.keys()
            for seq in thread.sequences.values():
                self.ended_well(seq)

        def ended_well(self, seq: Any) -> None:
            if seq.id in self.aborted:
                assert seq.finish is Finish.ABORT
            elif seq.finish is Finish.LENGTH:
                longest = self.thread.scheduler.max_model_len - len(seq.prompt)
                assert len(seq.output) == min(seq.sampling.max_tokens, longest)
            else:
                assert seq.finish is Finish.ERROR
                assert seq.admitted_at is None, "who started on an adapter finishes on it"

    return Scheduling


def test_any_interleaving_keeps_every_law(engine_thread: Any) -> None:
    run_state_machine_as_test(make_machine(engine_thread))


REQUESTS = st.lists(
    st.tuples(
        st.none() | NAMES,
        st.lists(st.integers(0, 9), min_size=1, max_size=12),
        st.integers(1, 16),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=14,
)


@given(requests=REQUESTS, pages=st.integers(8, 40), budget=st.integers(4, 20))
def test_a_text_depends_neither_on_its_neighbours_nor_on_preemption(
    engine_thread: Any, requests: list[Any], pages: int, budget: int
) -> None:
    thread = engine_thread(pages=pages, max_running=4, max_step_tokens=budget)
    for name in "abcd":
        thread.offer(name, digest=name)
    for adapter, prompt, tokens, pause in requests:
        seq = thread.add(adapter, prompt, min(tokens, thread.scheduler.max_model_len - len(prompt)))
        for _ in range(pause):
            thread.turn()
        assert seq.finish in (None, Finish.LENGTH)
    thread.until_all_end()
    for seq in thread.sequences.values():
        weights = None if seq.adapter is None else (seq.adapter, seq.adapter)
        assert seq.output == thread.text(seq.prompt, weights, seq.sampling.max_tokens)
    thread.scheduler.check()
    assert thread.pool.available == pages


@given(
    pages=st.integers(2, 12),
    prompts=st.lists(st.integers(1, 20), min_size=2, max_size=10),
    window=st.none() | st.integers(1, 12),
)
def test_whoever_came_first_is_never_preempted(
    engine_thread: Any, pages: int, prompts: list[int], window: int | None
) -> None:
    thread = engine_thread(pages=pages, window=window, max_step_tokens=8)
    longest = thread.scheduler.max_model_len
    for tokens in prompts:
        thread.add(None, [1] * min(tokens, longest - 1), 40)
    while live := [seq for seq in thread.sequences.values() if seq.finish is None]:
        before = live[0].preemptions
        thread.turn()
        assert live[0].preemptions == before
