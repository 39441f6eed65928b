"""A tenant's limits as one call sees them: what it costs, what was answered, what is left.

A `Plan` is what the store is asked for the requests of one tenant and model. It is made once and
kept until the tenant changes or a budget's window ends, because its words are the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from gateway.state.tenants import Limits, Tenant, bucket_key, budget_key, lease_key
from gateway.store.redis import Word
from shared.ids import TenantId

Kind = Literal["rate", "budget", "lease"]

NANO: Final = 10**9
LEASES: Final = "concurrency"

_MINUTE: Final = {
    "requests": "requests_per_min",
    "tokens": "tokens_per_min",
    "input_tokens": "input_tokens_per_min",
    "output_tokens": "output_tokens_per_min",
}
_WINDOWS: Final = {
    "tokens_per_day": "day",
    "tokens_per_month": "month",
    "spend_per_day": "day",
    "spend_per_month": "month",
}
_SHOWN_AS: Final = {  # the header of the limit; of several the tightest is shown
    "requests": "requests",
    "tokens": "tokens",
    "tokens_per_day": "tokens",
    "tokens_per_month": "tokens",
    "input_tokens": "input-tokens",
    "output_tokens": "output-tokens",
}


class Need(NamedTuple):
    """What one request may come to, by estimate; or what it came to."""

    input_tokens: int = 0
    output_tokens: int = 0
    spend: int = 0  # nano-units of money


def _all_tokens(need: Need) -> int:
    return need.input_tokens + need.output_tokens


_COST: Final[dict[str, Callable[[Need], int]]] = {
    "requests": lambda need: 1,
    "concurrency": lambda need: 1,
    "tokens": _all_tokens,
    "tokens_per_day": _all_tokens,
    "tokens_per_month": _all_tokens,
    "input_tokens": lambda need: need.input_tokens,
    "output_tokens": lambda need: need.output_tokens,
    "spend_per_day": lambda need: need.spend,
    "spend_per_month": lambda need: need.spend,
}


class Line(NamedTuple):
    """One limit of one tenant."""

    kind: Kind
    name: str
    model: str  # "": over all of the tenant's requests
    limit: int
    key: str  # where the store keeps it
    field: str  # and under which name there
    until: float = 0.0  # wall seconds: when a budget's window ends

    @property
    def title(self) -> str:
        """For people: `tokens per minute for pirate`."""
        words = self.name.replace("_", " ")
        text = f"{words} per minute" if self.kind == "rate" else words
        return f"{text} for {self.model}" if self.model else text

    def cost(self, need: Need) -> int:
        """What it came to."""
        return _COST[self.name](need)

    def estimate(self, need: Need) -> int:
        """What it may come to, clipped to a minute's allowance: or it would never fit."""
        cost = _COST[self.name](need)
        return min(cost, self.limit) if self.kind == "rate" else cost


class Plan:
    """All limits of one tenant's requests for one model; empty when there are none."""

    __slots__ = ("blocked", "keys", "leased", "lines", "model", "tenant", "until", "words")

    def __init__(self, tenant: Tenant, model: str, wall: float, lease_s: float) -> None:
        self.tenant, self.model = tenant, model
        windows = {"day": _day(wall), "month": _month(wall)}
        lines = [*_lines(tenant.id, tenant.limits, "", windows)]
        if (own := tenant.adapter_limits.get(model)) is not None:
            lines += _lines(tenant.id, own, model, windows)
        self.lines = tuple(sorted(lines, key=lambda line: line.kind != "rate"))
        self.until = windows["day"][1]
        self.leased = any(line.kind == "lease" for line in self.lines)
        self.blocked = next((line for line in self.lines if line.limit == 0), None)
        self.keys = [*dict.fromkeys(line.key for line in self.lines)]
        self.words: list[Word] = ["", len(self.lines)]
        for line in self.lines:
            until_us = round((lease_s if line.kind == "lease" else line.until) * 1e6)
            index = self.keys.index(line.key) + 1
            self.words += (line.kind, index, line.field, line.limit, until_us)

    def costs(self, need: Need) -> list[int]:
        """Estimates, a line each."""
        return [line.estimate(need) for line in self.lines]


class Answer(NamedTuple):
    lines: Sequence[Line]
    levels: Sequence[float]  # after the call
    refuses: Line | None = None
    wait_s: float = 0.0


def answer_of(lines: Sequence[Line], reply: Sequence[bytes]) -> Answer:
    """What the script says of one request (store/reserve.lua)."""
    index, wait_s, *levels = reply
    refuses = lines[int(index) - 1] if index != b"0" else None
    return Answer(lines, [float(level) for level in levels], refuses, float(wait_s))


@dataclass(frozen=True, slots=True)
class LimitLine:
    name: str
    model: str
    limit: int
    remaining: int
    reset_s: float  # until all of it is there again; of a lease unknown: 0


def _lines(
    tenant: TenantId, limits: Limits, model: str, windows: dict[str, tuple[str, float]]
) -> Iterator[Line]:
    suffix = f"/{model}" if model else ""
    for name, field in _MINUTE.items():
        if (limit := getattr(limits, field)) is not None:
            yield Line("rate", name, model, limit, bucket_key(tenant), name + suffix)
    for name, window in _WINDOWS.items():
        if (amount := getattr(limits, name)) is not None:
            label, until = windows[window]
            limit = round(amount * NANO) if name.startswith("spend") else amount
            yield Line(
                "budget", name, model, limit, budget_key(tenant, label), name + suffix, until
            )
    if limits.concurrency is not None:
        yield Line(
            "lease", LEASES, model, limits.concurrency, lease_key(tenant, model), LEASES + suffix
        )


def _day(wall: float) -> tuple[str, float]:
    """The label of the day in UTC, and when it ends."""
    at = datetime.fromtimestamp(wall, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return f"{at:%Y-%m-%d}", (at + timedelta(days=1)).timestamp()


def _month(wall: float) -> tuple[str, float]:
    at = datetime.fromtimestamp(wall, UTC)
    ends = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
    return f"{at:%Y-%m}", ends.timestamp()


# what the tenant may read of it


def lines_left(answer: Answer, now: float) -> list[LimitLine]:
    """An answer as people may read it; `now` is wall time."""
    return [
        LimitLine(
            line.name, line.model, line.limit, max(0, math.floor(level)), _reset_s(line, level, now)
        )
        for line, level in zip(answer.lines, answer.levels, strict=True)
    ]


def header_lines(answer: Answer, now: float) -> str:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens,…}`, as OpenAI writes them.

    Of several limits that share a header the one with the least left is shown.
    """
    tightest: dict[str, tuple[Line, float]] = {}
    for line, level in zip(answer.lines, answer.levels, strict=True):
        if (name := _SHOWN_AS.get(line.name)) is not None:
            held = tightest.get(name)
            if held is None or level < held[1]:
                tightest[name] = (line, level)
    text = ""
    for name, (line, level) in tightest.items():
        left = int(level) if level > 0 else 0
        text += (
            f"x-ratelimit-limit-{name}: {line.limit}\r\nx-ratelimit-remaining-{name}: {left}\r\n"
            f"x-ratelimit-reset-{name}: {_duration(_reset_s(line, level, now))}\r\n"
        )
    return text


def _reset_s(line: Line, level: float, now: float) -> float:
    if line.kind == "budget":
        return max(0.0, line.until - now)
    if line.kind == "lease":
        return 0.0
    return max(0.0, line.limit - level) / (line.limit / 60) if line.limit else math.inf


def _duration(seconds: float) -> str:
    """`120ms`, `7.5s`, `6m0s`: rounded up, so that it is never too early."""
    if not math.isfinite(seconds):
        return "1h0m0s"
    millis = math.ceil(seconds * 1000)
    if millis < 1000:
        return f"{millis}ms"
    if millis > 3_600_000:
        whole = math.ceil(seconds)
        return f"{whole // 3600}h{whole // 60 % 60}m{whole % 60}s"
    minutes, rest = divmod(millis, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
