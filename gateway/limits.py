"""A tenant's limits as one call sees them: what it costs, what was answered, what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.tenants import Limits

Limit = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class LimitLine:
    limit: int
    remaining: int
    reset_s: float  # until the bucket is full again


@dataclass(frozen=True, slots=True)
class LimitState:
    requests: LimitLine | None = None  # None: there is no such limit
    tokens: LimitLine | None = None

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, as OpenAI writes them."""
        named = {}
        for name, line in (("requests", self.requests), ("tokens", self.tokens)):
            if line is not None:
                named[f"x-ratelimit-limit-{name}"] = str(line.limit)
                named[f"x-ratelimit-remaining-{name}"] = str(line.remaining)
                named[f"x-ratelimit-reset-{name}"] = _duration(line.reset_s)
        return named


@dataclass(frozen=True, slots=True)
class Line:
    """One limit of one tenant in one call."""

    name: Limit
    limit: int
    cost: int


@dataclass(frozen=True, slots=True)
class Answer:
    lines: Sequence[Line]  # with the costs as they were asked for
    levels: Sequence[float]  # after the call
    refuses: Line | None = None
    wait_s: float = 0.0


def lines_of(limits: Limits, tokens: int) -> list[Line]:
    """The limits that are there, each with what one request costs it."""
    lines = []
    if limits.requests_per_min is not None:
        lines.append(Line("requests", limits.requests_per_min, 1))
    if limits.tokens_per_min is not None:
        cost = min(tokens, limits.tokens_per_min)
        lines.append(Line("tokens", limits.tokens_per_min, cost))
    return lines


def state_of(answer: Answer) -> LimitState:
    """An answer as the tenant may read it."""
    found: dict[Limit, LimitLine] = {}
    for line, level in zip(answer.lines, answer.levels, strict=True):
        missing = max(0.0, line.limit - level)
        reset_s = missing / (line.limit / 60) if line.limit else math.inf
        remaining = max(0, math.floor(min(level, line.limit)))
        found[line.name] = LimitLine(line.limit, remaining, reset_s)
    return LimitState(found.get("requests"), found.get("tokens"))


def _duration(seconds: float) -> str:
    """`120ms`, `7.5s`, `6m0s`: rounded up, so that it is never too early."""
    if not math.isfinite(seconds):
        return "1h0m0s"
    millis = math.ceil(seconds * 1000)
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
