"""A recipe for a synthetic trace, and the dice that follow it.

Gaps are exponential (Poisson) or gamma with the coefficient of variation asked for; the rate moves
with a `Tide`; the adapter of a rank is drawn by `popularity`, and ranks may drift from adapter to
adapter; every adapter belongs to one tenant; prompt lengths are log-normal and output lengths
exponential: the families that fit measured traces best. With sessions, arrivals of the stream are
first requests, and each draws geometrically many followers after exponential thinking times, whose
prompts carry what was said before.

The same recipe gives the same bytes on every machine: only `Random.random` is drawn from, whose
sequence Python promises, and values are rounded before they are written.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice
from random import Random

from loadtests.popularity import Popularity, shares
from loadtests.tide import Tide
from loadtests.trace import Arrival
from shared.ids import AdapterId, TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a synthetic trace is made of."""

    seed: int = 1
    arrivals: int = 1000
    rate_per_s: float = 10.0
    burstiness: float = 1.0  # standard deviation of the gaps over their mean; 1 is Poisson
    tide: Tide = field(default_factory=Tide)
    adapters: int = 100
    popularity: Popularity = Popularity.ZIPF
    skew: float | None = 1.1  # the popularity's parameter; of Zipf's, 0 is uniform
    drift_s: float = 0.0  # every so often each adapter moves one rank down, the last to the top
    crowd_adapter: int | None = None  # whom a flash crowd asks for; None: the one of middle rank
    base_share: float = 0.0  # part of the requests that ask for the base model
    tenants: int = 10
    session_requests: float = 1.0  # mean requests of a session; 1: no sessions
    think_s: float = 30.0  # mean time from one request of a session to the next
    prompt_tokens_mean: float = 128.0
    prompt_sigma: float = 0.8  # of the logarithm: 0 makes all prompts equal
    prompt_tokens_max: int = 2048
    output_tokens_mean: float = 64.0
    output_tokens_max: int = 512

    def __post_init__(self) -> None:
        for name in ("arrivals", "adapters", "tenants", "prompt_tokens_max", "output_tokens_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: at least 1, not {getattr(self, name)}")
        above = ("rate_per_s", "burstiness", "think_s", "prompt_tokens_mean", "output_tokens_mean")
        for name in above:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: above 0, not {getattr(self, name)}")
        if self.prompt_sigma < 0 or self.drift_s < 0 or not 0 <= self.base_share <= 1:
            raise ValueError("prompt_sigma and drift_s are at least 0, base_share lies in 0..1")
        if self.session_requests < 1:
            raise ValueError(f"session_requests: at least 1, not {self.session_requests}")
        if self.crowd_adapter is not None and not 0 <= self.crowd_adapter < self.adapters:
            raise ValueError(f"crowd_adapter: 0..{self.adapters - 1}, not {self.crowd_adapter}")
        shares(self.popularity, 1, self.skew)


def generate(recipe: Recipe) -> Iterator[Arrival]:
    """The recipe's arrivals, in order; at first adapter-000 is the most popular."""
    dice = Random(recipe.seed)
    firsts = _Firsts(recipe, dice)
    if recipe.session_requests == 1:
        return islice(firsts, recipe.arrivals)
    return islice(_sessions(firsts, recipe, dice), recipe.arrivals)


class _Firsts(Iterator[Arrival]):
    """The endless stream of requests that follow no other."""

    def __init__(self, recipe: Recipe, dice: Random) -> None:
        self._recipe = recipe
        self._dice = dice
        self._ranks = list(accumulate(shares(recipe.popularity, recipe.adapters, recipe.skew)))
        self._width = len(str(recipe.adapters - 1))
        self._mu = math.log(recipe.prompt_tokens_mean) - recipe.prompt_sigma**2 / 2
        self._gap_s = recipe.session_requests / recipe.rate_per_s
        self._elapsed = 0.0

    def __next__(self) -> Arrival:
        recipe, dice = self._recipe, self._dice
        self._elapsed += _gap(dice, recipe.burstiness) * self._gap_s
        at_s = recipe.tide.at(self._elapsed)
        # Every row takes the same number of draws, so that changing one share moves nothing else.
        is_base, drawn, owner = dice.random(), dice.random(), dice.random()
        number = self._number(drawn, at_s)
        base = is_base < recipe.base_share
        tenant = int(owner * recipe.tenants) if base else number % recipe.tenants
        prompt = math.exp(self._mu + recipe.prompt_sigma * _normal(dice))
        return Arrival(
            at_s=round(at_s, 6),
            tenant=TenantId(f"tenant-{tenant}"),
            adapter=None if base else AdapterId(f"adapter-{number:0{self._width}d}"),
            prompt_tokens=_within(prompt, recipe.prompt_tokens_max),
            output_tokens=_output(dice, recipe),
        )

    def _number(self, drawn: float, at_s: float) -> int:
        """The adapter that is asked for: by rank, by drift, or because a crowd wants it."""
        recipe = self._recipe
        crowd = recipe.tide.crowd_share(at_s)
        if drawn < crowd:
            chosen = recipe.crowd_adapter
            return recipe.adapters // 2 if chosen is None else chosen
        drawn = (drawn - crowd) / (1 - crowd)
        rank = min(bisect_left(self._ranks, drawn), recipe.adapters - 1)
        moved = int(at_s / recipe.drift_s) if recipe.drift_s else 0
        return (rank - moved) % recipe.adapters


def _sessions(firsts: Iterator[Arrival], recipe: Recipe, dice: Random) -> Iterator[Arrival]:
    """First requests and their followers, merged by time; at most one row a session waits."""
    waiting: list[tuple[float, int, Arrival]] = []
    ending = 1 / recipe.session_requests
    upcoming = next(firsts)
    for number in _count():
        if not waiting or upcoming.at_s <= waiting[0][0]:
            row, session = _named(upcoming, number), number
            upcoming = next(firsts)
        else:
            _, session, row = heapq.heappop(waiting)
        yield row
        if dice.random() >= ending:
            follower = _follower(row, recipe, dice)
            heapq.heappush(waiting, (follower.at_s, session, follower))


def _follower(row: Arrival, recipe: Recipe, dice: Random) -> Arrival:
    said = row.prompt_tokens + row.output_tokens
    return Arrival(
        at_s=round(row.at_s + _exponential(dice) * recipe.think_s, 6),
        tenant=row.tenant,
        adapter=row.adapter,
        prompt_tokens=_within(said + _output(dice, recipe), recipe.prompt_tokens_max),
        output_tokens=_output(dice, recipe),
        session=row.session,
    )


def _named(row: Arrival, number: int) -> Arrival:
    return Arrival(
        at_s=row.at_s,
        tenant=row.tenant,
        adapter=row.adapter,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        session=f"session-{number}",
    )


def _count() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def _output(dice: Random, recipe: Recipe) -> int:
    return _within(_exponential(dice) * recipe.output_tokens_mean, recipe.output_tokens_max)


def _within(tokens: float, most: int) -> int:
    return min(max(round(tokens), 1), most)


def _gap(dice: Random, burstiness: float) -> float:
    """A gap of mean 1: exponential, or gamma of shape k = 1 / cv^2."""
    if burstiness == 1:
        return _exponential(dice)
    shape = burstiness**-2
    return _gamma(dice, shape) / shape


def _gamma(dice: Random, shape: float) -> float:
    """Marsaglia and Tsang 2000; below shape 1 by their boost from shape + 1."""
    if shape < 1:
        return _gamma(dice, shape + 1) * math.pow(1.0 - dice.random(), 1 / shape)
    d = shape - 1 / 3
    c = 1 / math.sqrt(9 * d)
    while True:
        x = _normal(dice)
        v = (1 + c * x) ** 3
        if v > 0 and math.log(1.0 - dice.random()) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v


def _exponential(dice: Random) -> float:
    return -math.log(1.0 - dice.random())


def _normal(dice: Random) -> float:
    radius = math.sqrt(2 * _exponential(dice))  # Box and Muller
    return radius * math.cos(2 * math.pi * dice.random())
