"""`loraplex usage`: what was used, from the ledger's hourly roll-ups."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.output import csv_text, show, show_json


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
    with admin(gateway) as api:
        rows = api.get("usage", **{"from": start, "to": end, "by": by})["data"]
    columns = list(rows[0]) if rows else []
    if as_json or form is Format.JSON:
        show_json(rows)
    elif form is Format.CSV:
        print(csv_text(rows, columns), end="")
    else:
        show(rows, columns, empty="nothing was used in that time")
