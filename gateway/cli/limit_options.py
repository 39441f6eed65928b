"""The options that name a tenant's limits: read from the limits there are, one option each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from gateway.cli.failure import usage_failure

UNLIMITED: Final = "none"
MONEY: Final = "spend_"
LIMITS: Final = (
    "requests_per_min",
    "tokens_per_min",
    "input_tokens_per_min",
    "output_tokens_per_min",
    "concurrency",
    "tokens_per_day",
    "tokens_per_month",
    "spend_per_day",
    "spend_per_month",
)
"""As the admin API names them."""

Number = Annotated[str | None, typer.Option(metavar="N", help="A whole number, or `none`.")]
Money = Annotated[
    str | None,
    typer.Option(metavar="AMOUNT", help="Money, in the unit of the price table, or `none`."),
]


def limits_of(given: Mapping[str, str | None]) -> dict[str, float | None]:
    """Those that were named. Raises a usage Failure for what is no limit."""
    return {name: _limit(name, text) for name, text in given.items() if text is not None}


def flat(limits: Mapping[str, Any]) -> dict[str, Any]:
    """For a table: no limit reads as such."""
    return {name: UNLIMITED if limit is None else limit for name, limit in limits.items()}


def _limit(name: str, text: str) -> float | None:
    if text == UNLIMITED:
        return None
    if name.startswith(MONEY):
        try:
            amount = float(text)
        except ValueError:
            amount = math.nan
        if math.isfinite(amount) and amount >= 0:
            return amount
    elif text.isdecimal():
        return int(text)
    what = "an amount of money" if name.startswith(MONEY) else "a whole number"
    flag = f"--{name.replace('_', '-')}"
    raise usage_failure(f"{flag} {text}: {what}, or `{UNLIMITED}` for no limit.")
