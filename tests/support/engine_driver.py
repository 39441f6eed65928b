"""Drive a Runner by hand: several sequences, each in its slot, in chunks, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from replica.core.pages import RELEASED
from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Row, Step
from replica.engine.host_adapter import HostAdapter
from replica.engine.runner import Runner

GREEDY = Sampling(max_tokens=64, temperature=0)
ADAPTER_PAGES = 128
"""More than any adapter of the tests takes."""


def pool_pages(for_keys: int, slots: int) -> int:
    """Pages for a driver, and above them some for each slot."""
    return for_keys + slots * ADAPTER_PAGES


def load(runner: Runner, slot: int, adapter: HostAdapter, for_keys: int) -> None:
    """Into the slot's own pages, the last one first."""
    end = for_keys + (slot + 1) * ADAPTER_PAGES
    runner.load(slot, adapter, range(end - 1, end - 1 - runner.pages_of(adapter), -1))


@dataclass
class Driven:
    tokens: list[int]
    slot: int
    sampling: Sampling
    prompt_tokens: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


class Driver:
    """Pages are handed out in an order that makes no sequence's neighbours, and come back dirty:
    those that a window has passed at once, to the next that wants one."""

    def __init__(self, runner: Runner, *, pages: int, page_tokens: int) -> None:
        self.runner = runner
        self.page_tokens = page_tokens
        self._free = [*range(1, pages, 2), *range(0, pages, 2)]
        self.sequences: dict[str, Driven] = {}

    def add(
        self,
        seq: str,
        prompt: Sequence[int],
        slot: int = BASE_SLOT,
        sampling: Sampling = GREEDY,
    ) -> None:
        self.sequences[seq] = Driven(list(prompt), slot, sampling, len(prompt))

    def end(self, seq: str) -> list[int]:
        """Give the pages back as they are and return what was drawn."""
        self.preempt(seq)
        return self.sequences.pop(seq).output

    def preempt(self, seq: str) -> None:
        driven = self.sequences[seq]
        self._free += [page for page in driven.pages if page != RELEASED]
        driven.pages, driven.computed = [], 0

    def step(self, chunk: int = 1 << 30) -> Step:
        """Every sequence's next stretch of at most `chunk` tokens."""
        rows = [self._row(seq, chunk) for seq in self.sequences]
        return Step(tuple(sorted(rows, key=lambda row: row.slot)))

    def run(self, chunk: int = 1 << 30) -> dict[str, int]:
        """One step; what was drawn is appended."""
        step = self.step(chunk)
        tokens = self.runner.run(step)
        self._commit(step)
        for seq, token in tokens.items():
            self.sequences[seq].tokens.append(token)
        return tokens

    def logits(self, chunk: int = 1 << 30) -> dict[str, Tensor]:
        """One step; nothing is drawn, so the caller appends the next tokens."""
        step = self.step(chunk)
        logits = self.runner.logits(step)
        self._commit(step)
        return logits

    def generate(self, tokens: int, chunk: int = 1 << 30) -> dict[str, list[int]]:
        """Until every sequence has drawn `tokens`; then all end."""
        names = list(self.sequences)
        done: dict[str, list[int]] = {}
        while self.sequences:
            self.run(chunk)
            for seq in list(self.sequences):
                if len(self.sequences[seq].output) >= tokens:
                    done[seq] = self.end(seq)
        return {seq: done[seq] for seq in names}

    def _row(self, seq: str, chunk: int) -> Row:
        driven = self.sequences[seq]
        end = min(len(driven.tokens), driven.computed + chunk)
        window = self.runner.config.window
        passed = 0 if window is None else max(0, driven.computed + 1 - window) // self.page_tokens
        gone = [page for page in driven.pages[:passed] if page != RELEASED]
        driven.pages[:passed] = [RELEASED] * passed
        self._free[:0] = gone
        while len(driven.pages) * self.page_tokens < end:
            driven.pages.append(self._free.pop(0))
        return Row(
            seq=seq,
            slot=driven.slot,
            start=driven.computed,
            tokens=tuple(driven.tokens[driven.computed : end]),
            pages=tuple(driven.pages),
            samples=end == len(driven.tokens),
            sampling=driven.sampling,
            drawn=len(driven.output),
            output=tuple(driven.output) if driven.sampling.penalises else (),
        )

    def _commit(self, step: Step) -> None:
        for row in step.rows:
            self.sequences[row.seq].computed = row.end
