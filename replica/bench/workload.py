"""Workload: what vLLM was measured on, so that figures stand side by side.

Prompts are random tokens, no two alike; every request draws exactly `output` tokens, the likeliest.
Request i has no adapter, the same as all others, the (i mod n)-th of n, or one drawn by Zipf 1.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from replica.core.sequence import Sampling
from replica.core.sequence import Sequence as Request
from replica.engine.model_config import ModelConfig
from shared.ids import AdapterId

MIXES: Final = ("none", "one", "distinct", "zipf")
_TOKENS: Final = (1000, 120_000)
_serial = count()


@dataclass(frozen=True, slots=True)
class Work:
    concurrency: int
    mix: str
    prompt: int = 256
    output: int = 128
    requests: int = 0  # 0: three times the concurrency

    @property
    def count(self) -> int:
        return self.requests or (3 * self.concurrency if self.concurrency > 1 else 4)

    def adapters(self, there_are: int) -> list[int | None]:
        """Which of them each request names."""
        n = self.count
        match self.mix:
            case "none":
                return [None] * n
            case "one":
                return [0] * n
            case "distinct":
                return [i % there_are for i in range(n)]
            case "zipf":
                weights = 1.0 / np.arange(1, there_are + 1) ** 1.1
                dice = np.random.default_rng(7)
                return [int(i) for i in dice.choice(there_are, size=n, p=weights / weights.sum())]
            case _:
                raise ValueError(f"no mix {self.mix!r}: there are {', '.join(MIXES)}")

    def requests_for(self, config: ModelConfig, there_are: int, seed: int) -> list[Request]:
        """`there_are` adapters, named a0, a1, …"""
        sampling = Sampling(max_tokens=self.output, temperature=0.0, ignore_eos=True)
        low, high = min(_TOKENS[0], config.vocab_size // 2), min(_TOKENS[1], config.vocab_size)
        made = []
        for i, adapter in enumerate(self.adapters(there_are)):
            dice = np.random.default_rng(1_000_003 * seed + i)
            prompt = tuple(dice.integers(low, high, self.prompt).tolist())
            name = None if adapter is None else AdapterId(f"a{adapter}")
            made.append(Request(f"q{next(_serial)}", name, prompt, sampling, 0.0))
        return made
