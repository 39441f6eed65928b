"""`loraplex usage`: what was used, from the ledger's hourly roll-ups."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.failure import usage_failure
from gateway.cli.output import csv_text, show, show_json
from shared.clock import wall


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def usage(
    start: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="ISO 8601; default: the last day.")
    ] = None,
    end: Annotated[
        str | None, typer.Option("--to", metavar="TIME", help="ISO 8601; default: now.")
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="NAMES", help="Of tenant, adapter, version, replica, hour.")
    ] = "tenant,adapter",
    form: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    gateway: GatewayOption = "",
) -> None:
    """Requests and tokens of each tenant and adapter, hour by hour."""
    _check(start, end)
    with admin(gateway) as api:
        rows = api.get("usage", **{"from": start, "to": end, "by": by})["data"]
    columns = list(rows[0]) if rows else []
    if as_json or form is Format.JSON:
        show_json(rows)
    elif form is Format.CSV:
        print(csv_text(rows, columns), end="")
    else:
        show(rows, columns, empty="nothing was used in that time")


def _check(start: str | None, end: str | None) -> None:
    """The gateway would answer a time that runs backwards with nothing, which reads as no use."""
    began_at = None if start is None else _seconds("--from", start)
    ended_at = wall() if end is None else _seconds("--to", end)
    if began_at is not None and began_at > ended_at:
        until = "now" if end is None else f"--to {end}"
        raise usage_failure(f"--from {start} is later than {until}: give the earlier time first.")


def _seconds(flag: str, text: str) -> float:
    """As the gateway reads it: ISO 8601, UTC when it names no zone, or seconds since 1970."""
    try:
        if text.strip().replace(".", "", 1).isdecimal():
            return datetime.fromtimestamp(float(text), UTC).timestamp()
        at = datetime.fromisoformat(text.strip())
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        hint = "a time such as 2026-11-29T15:00Z, or seconds since 1970"
        raise usage_failure(f"{flag} {text!r}: not {hint}.") from None
