"""How much each adapter has been used lately: counts that halve every `half_life_s`.

    score(now) = sum over uses of 2 ** (-(now - use) / half_life_s)
    rate_per_s = score * ln 2 / half_life_s          (exact for a steady rate)

Scores are kept as of a common moment, so that time passing touches nothing; a use costs one
dictionary entry. Uses are counted at once and take their moment at the next `settle`.

An adapter that is expected at a rate (a schedule) scores what that rate would have given it.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from shared.ids import AdapterId

_LEAST: Final = 1e-3
"""A lower score is forgotten."""


class Expected(NamedTuple):
    """An adapter that will be asked for, from a schedule. Moments as `now`."""

    adapter: AdapterId
    rate_per_s: float
    starts_at: float
    ends_at: float


class Popularity:
    def __init__(self, *, half_life_s: float) -> None:
        if not half_life_s > 0:
            raise ValueError(f"a half-life is above zero, not {half_life_s}")
        self._half_life_s = half_life_s
        self._uses: dict[AdapterId | None, int] = {}
        self._scores: dict[AdapterId | None, float] = {}
        self._at = 0.0

    def used(self, adapter: AdapterId | None) -> None:
        """Once, now. None: the base."""
        self._uses[adapter] = self._uses.get(adapter, 0) + 1

    def settle(self, now: float) -> None:
        """Bring all scores to `now`."""
        fade = 0.5 ** (max(0.0, now - self._at) / self._half_life_s)
        self._at = max(self._at, now)
        kept = {name: score * fade for name, score in self._scores.items()}
        for name, uses in self._uses.items():
            kept[name] = kept.get(name, 0.0) + uses
        self._uses.clear()
        self._scores = {name: score for name, score in kept.items() if score >= _LEAST}

    def score(self, adapter: AdapterId) -> float:
        """As of the last `settle`."""
        return self._scores.get(adapter, 0.0)

    def total(self) -> float:
        """Of all, the base included."""
        return math.fsum(self._scores.values())

    def score_of_rate(self, rate_per_s: float) -> float:
        return rate_per_s * self._half_life_s / math.log(2)

    def names(self) -> list[AdapterId]:
        return [name for name in self._scores if name is not None]

    def check(self) -> None:
        assert all(score >= _LEAST for score in self._scores.values())
        assert all(uses > 0 for uses in self._uses.values())
