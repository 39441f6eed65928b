"""A recipe for a synthetic trace, and the dice that follow it.

Arrivals are Poisson (exponential gaps of mean 1 / rate), the adapter of rank r = 1..N has
probability r^-s / H_N(s) (Zipf), every adapter belongs to one tenant, prompt lengths are log-normal
and output lengths exponential: the families that fit measured traces best.

The same recipe gives the same bytes on every machine: only `Random.random` is drawn from, whose
sequence Python promises, and values are rounded before they are written.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from loadtests.trace import Arrival
from shared.ids import AdapterId, TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a synthetic trace is made of."""

    seed: int = 1
    arrivals: int = 1000
    rate_per_s: float = 10.0
    adapters: int = 100
    skew: float = (
        1.1  # Zipf's s: 0 is uniform, 1.1 gives a fifth of the traffic to the first of 100
    )
    base_share: float = 0.0  # part of the requests that ask for the base model
    tenants: int = 10
    prompt_tokens_mean: float = 128.0
    prompt_sigma: float = 0.8  # of the logarithm: 0 makes all prompts equal
    prompt_tokens_max: int = 2048
    output_tokens_mean: float = 64.0
    output_tokens_max: int = 512

    def __post_init__(self) -> None:
        for field in ("arrivals", "adapters", "tenants", "prompt_tokens_max", "output_tokens_max"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: at least 1, not {getattr(self, field)}")
        for field in ("rate_per_s", "prompt_tokens_mean", "output_tokens_mean"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field}: above 0, not {getattr(self, field)}")
        if self.skew < 0 or self.prompt_sigma < 0 or not 0 <= self.base_share <= 1:
            raise ValueError("skew and prompt_sigma are at least 0, base_share lies in 0..1")


def generate(recipe: Recipe) -> Iterator[Arrival]:
    """The recipe's arrivals, in order; adapter-000 is the most popular."""
    dice = Random(recipe.seed)
    cumulative = list(accumulate(zipf(recipe.adapters, recipe.skew)))
    width = len(str(recipe.adapters - 1))
    mu = math.log(recipe.prompt_tokens_mean) - recipe.prompt_sigma**2 / 2
    at_s = 0.0
    for _ in range(recipe.arrivals):
        at_s += _exponential(dice) / recipe.rate_per_s
        # Every row takes the same number of draws, so that changing one share moves nothing else.
        is_base, drawn, owner = dice.random(), dice.random(), dice.random()
        rank = min(bisect_left(cumulative, drawn), recipe.adapters - 1)
        adapter = AdapterId(f"adapter-{rank:0{width}d}")
        base = is_base < recipe.base_share
        tenant = int(owner * recipe.tenants) if base else rank % recipe.tenants
        prompt = math.exp(mu + recipe.prompt_sigma * _normal(dice))
        output = _exponential(dice) * recipe.output_tokens_mean
        yield Arrival(
            at_s=round(at_s, 6),
            tenant=TenantId(f"tenant-{tenant}"),
            adapter=None if base else adapter,
            prompt_tokens=min(max(round(prompt), 1), recipe.prompt_tokens_max),
            output_tokens=min(max(round(output), 1), recipe.output_tokens_max),
        )


def zipf(count: int, skew: float) -> list[float]:
    """Probabilities of ranks 1..count: r^-skew, normalised."""
    weights = [rank**-skew for rank in range(1, count + 1)]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _exponential(dice: Random) -> float:
    return -math.log(1.0 - dice.random())


def _normal(dice: Random) -> float:
    radius = math.sqrt(2 * _exponential(dice))  # Box and Muller
    return radius * math.cos(2 * math.pi * dice.random())
