"""A tenant's limits as one call sees them: what it costs, what was answered, what is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gateway.tenants import Limits

Limit = Literal["requests", "tokens"]


@dataclass(slots=True)
class LimitLine:
    limit: int
    remaining: int
    reset_s: float  # until the bucket is full again


@dataclass(slots=True)
class LimitState:
    requests: LimitLine | None = None  # None: there is no such limit
    tokens: LimitLine | None = None

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`, as OpenAI writes them."""
        return dict(line.split(": ", 1) for line in self.lines().splitlines())

    def lines(self) -> str:
        """The same as header lines."""
        text = ""
        for name, line in (("requests", self.requests), ("tokens", self.tokens)):
            if line is not None:
                text += _three(name, line.limit, line.remaining, line.reset_s)
        return text


class Line(NamedTuple):
    """One limit of one tenant in one call."""

    name: Limit
    limit: int
    cost: int


class Answer(NamedTuple):
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


def answer_of(lines: Sequence[Line], reply: Sequence[bytes]) -> Answer:
    """What the script says of one request (store/reserve.lua)."""
    index, wait_s, *levels = reply
    refuses = lines[int(index) - 1] if index != b"0" else None
    return Answer(lines, [float(level) for level in levels], refuses, float(wait_s))


def state_of(answer: Answer) -> LimitState:
    """An answer as the tenant may read it."""
    state = LimitState()
    for line, level in zip(answer.lines, answer.levels, strict=True):
        found = LimitLine(line.limit, max(0, math.floor(level)), _reset_s(line.limit, level))
        if line.name == "requests":
            state.requests = found
        else:
            state.tokens = found
    return state


def header_lines(answer: Answer) -> str:
    """`state_of(answer).lines()`, for every reply."""
    text = ""
    for (name, limit, _), level in zip(answer.lines, answer.levels, strict=True):
        text += _three(name, limit, int(level) if level > 0 else 0, _reset_s(limit, level))
    return text


def _reset_s(limit: int, level: float) -> float:
    return max(0.0, limit - level) / (limit / 60) if limit else math.inf


def _three(name: str, limit: int, remaining: int, reset_s: float) -> str:
    return (
        f"x-ratelimit-limit-{name}: {limit}\r\nx-ratelimit-remaining-{name}: {remaining}\r\n"
        f"x-ratelimit-reset-{name}: {_duration(reset_s)}\r\n"
    )


def _duration(seconds: float) -> str:
    """`120ms`, `7.5s`, `6m0s`: rounded up, so that it is never too early."""
    if not math.isfinite(seconds):
        return "1h0m0s"
    millis = math.ceil(seconds * 1000)
    if millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
