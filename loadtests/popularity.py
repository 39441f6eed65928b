"""Popularity: what share of the requests the adapter of rank r = 1..N gets.

zipf        share(r) ~ r^-s                       s = 0 is uniform; 1.1 is a usual fleet
geometric   share(r) ~ q^(r-1)                    q in (0, 1): each takes q of the one before
uniform     share(r) = 1 / N
functions   share(1..k) = (k / N)^a               a = 0.19 fits Azure Functions (Shahrad et al.,
                                                  ATC 2020): heavier at the top than any Zipf
"""

from __future__ import annotations

import math
from enum import StrEnum


class Popularity(StrEnum):
    ZIPF = "zipf"
    GEOMETRIC = "geometric"
    UNIFORM = "uniform"
    FUNCTIONS = "functions"


DEFAULTS = {Popularity.ZIPF: 1.1, Popularity.GEOMETRIC: 0.9, Popularity.FUNCTIONS: 0.19}


def shares(kind: Popularity, count: int, parameter: float | None = None) -> list[float]:
    """Shares of ranks 1..count, falling, with sum 1. Raises ValueError on a parameter out of range.

    `parameter` is s, q or a above; None takes the usual value.
    """
    value = DEFAULTS.get(kind, 0.0) if parameter is None else parameter
    match kind:
        case Popularity.ZIPF:
            return zipf(count, value)
        case Popularity.UNIFORM:
            return [1 / count] * count
        case Popularity.GEOMETRIC:
            if not 0 < value < 1:
                raise ValueError(f"geometric popularity needs a ratio within 0..1, not {value}")
            return _normalised([value**rank for rank in range(count)])
        case Popularity.FUNCTIONS:
            if not 0 < value <= 1:
                raise ValueError(f"functions popularity needs an exponent in 0..1, not {value}")
            upto = [(rank / count) ** value for rank in range(count + 1)]
            return [upto[rank + 1] - upto[rank] for rank in range(count)]


def zipf(count: int, skew: float) -> list[float]:
    """Probabilities of ranks 1..count: r^-skew, normalised."""
    if skew < 0:
        raise ValueError(f"skew is at least 0, not {skew}")
    return _normalised([rank**-skew for rank in range(1, count + 1)])


def _normalised(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]
