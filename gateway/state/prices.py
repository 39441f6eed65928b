"""What tokens cost in money: a price a million, of a tenant and an adapter, in whole nano-units.

    spend = input * (prompt - cached) + cached_input * cached + output * completion

The first price that is there counts: of this tenant for this model, of this tenant for all, of all
tenants for this model, of all for all; else it is free. A record is stamped with what it cost when
it ended, so a new price changes no old bill. Money is a whole number of nano-units (10^-9) of
whatever currency the operator thinks in: sums are exact in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.state.tenants import BadField
from shared.messages import Usage

NANO: Final = 10**9
PRICE_MAX: Final = 1e6
ANY: Final = "*"
"""For every tenant, or for every model."""

_TOKENS: Final = 10**6  # a price is for so many
_FIELDS: Final = ("input", "cached_input", "output")


@dataclass(frozen=True, slots=True)
class Price:
    """Nano-units a token."""

    input: int = 0
    cached_input: int = 0
    output: int = 0

    def of(self, usage: Usage) -> int:
        """Nano-units."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        return (
            self.input * fresh
            + self.cached_input * usage.cached_tokens
            + self.output * usage.completion_tokens
        )

    def row(self) -> dict[str, float]:
        """Units a million tokens, as people write it."""
        return {name: getattr(self, name) * _TOKENS / NANO for name in _FIELDS}


FREE: Final = Price()

PriceTable = Mapping[tuple[str, str], Price]
"""By tenant and model, either of which may be ANY."""


def price_of(table: PriceTable, tenant: str, model: str) -> Price:
    if not table:
        return FREE
    for key in ((tenant, model), (tenant, ANY), (ANY, model), (ANY, ANY)):
        if (price := table.get(key)) is not None:
            return price
    return FREE


def checked_price(body: Mapping[str, Any]) -> Price:
    """Of units a million tokens; `cached_input` is `input` when it is not given. Or BadField."""
    found: dict[str, int] = {}
    for name in body:
        if name not in _FIELDS:
            raise BadField(name, f"unknown field; there are: {', '.join(_FIELDS)}")
    for name in _FIELDS:
        value = body.get(name)
        if value is None:
            if name != "cached_input":
                raise BadField(name, "is missing: the price of a million tokens")
            found[name] = found["input"]
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadField(name, "must be a number: the price of a million tokens")
        if not (math.isfinite(value) and 0 <= value <= PRICE_MAX):
            raise BadField(name, f"must be from 0 to {PRICE_MAX:.0f}, for a million tokens")
        nano = round(value * NANO / _TOKENS)
        if not math.isclose(nano, value * NANO / _TOKENS, abs_tol=1e-6):
            raise BadField(name, "may have three decimals, for a million tokens")
        found[name] = nano
    return Price(**found)
