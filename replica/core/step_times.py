"""StepTimes: how long a step takes, as a line through those that were measured, and how many tokens
of prompts a step may therefore carry beside rows that decode.

    seconds = base_s + token_s * prompt_tokens         least squares; a step counts half after HALF
    budget  = (ratio - 1) * base_s / token_s

`base_s` is a step whose rows only decode, `token_s` what each token of a prompt adds to it. So a
step with prompts takes about `ratio` times as long as one without, and that is what it does to the
time between two tokens of everybody else (chunked prefill, Sarathi-Serve, OSDI '24, whose budget is
a fixed number of tokens; what a token costs differs a thousandfold between a GPU and two cores).
The budget is never less than LEAST, so every prompt is computed in the end; before a step of either
kind was measured there is none. A step that took far longer than the line says counts as OUTLIER
times that, for the engine may have compiled, or been stopped.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from replica.core.step import Step

HALF: Final = 32
LEAST: Final = 16
OUTLIER: Final = 4.0

_KEPT: Final = 0.5 ** (1 / HALF)
_SPREAD: Final = 8.0
"""Tokens by which steps must differ, in the root mean square, to tell what a token costs."""
_TRUSTED: Final = 8.0


class StepTimes:
    def __init__(self, *, ratio: float | None) -> None:
        """None: steps are measured, and not limited."""
        if ratio is not None and not ratio > 1:
            raise ValueError(f"a step with prompts takes longer than one without: {ratio=}")
        self._ratio = ratio
        self._begun: deque[float] = deque()
        self._planned_at = 0.0
        self._ended_at = float("-inf")
        self._weight = 0.0
        self._tokens = self._seconds = 0.0  # means
        self._tokens2 = self._both = 0.0  # sums of squares and products about them
        self.token_s = 0.0

    @property
    def base_s(self) -> float:
        """0 while nothing is known."""
        return max(self._seconds - self.token_s * self._tokens, 0.0)

    @property
    def budget(self) -> int | None:
        """Tokens of prompts in a step that also decodes; None: no limit is known."""
        if self._ratio is None or self.token_s <= 0:
            return None
        return max(LEAST, int((self._ratio - 1) * self.base_s / self.token_s))

    def expected_s(self, step: Step) -> float:
        """0 while nothing is known."""
        return self.base_s + self.token_s * step.prompt_tokens

    def limit(self, most: int, *, decode: bool, now: float) -> int:
        """Tokens of prompts, `most` at most, in a step that is being planned; whether anybody
        decodes meanwhile."""
        self._planned_at = now
        budget = self.budget if decode else None
        return most if budget is None else min(budget, most)

    def begin(self) -> None:
        """What was planned last is under way, or queued behind the step before."""
        self._begun.append(self._planned_at)

    def end(self, step: Step, now: float) -> None:
        """The oldest of them has ended."""
        seconds = now - max(self._begun.popleft(), self._ended_at)
        self._ended_at = now
        if seconds > 0:
            self.observe(step.prompt_tokens, seconds)

    def observe(self, tokens: int, seconds: float) -> None:
        if self._weight > _TRUSTED:
            seconds = min(seconds, OUTLIER * (self.base_s + self.token_s * tokens))
        self._weight = self._weight * _KEPT + 1
        before = tokens - self._tokens
        self._tokens += before / self._weight
        self._seconds += (seconds - self._seconds) / self._weight
        self._tokens2 = self._tokens2 * _KEPT + before * (tokens - self._tokens)
        self._both = self._both * _KEPT + before * (seconds - self._seconds)
        if self._tokens2 >= _SPREAD**2 * self._weight:
            self.token_s = max(self._both / self._tokens2, 0.0)
