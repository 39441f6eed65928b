"""`loraplex events`: who changed what in the registry, and which replicas joined, newest first."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.output import JsonFlag, show, show_json, when

_COLUMNS: Final = ("when", "action", "subject", "actor", "detail")


def events(
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=5000, help="At most so many.")] = 20,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """The last changes of tenants, keys, adapters and prices, and of replicas that join."""
    with admin(gateway) as api:
        found = api.get("events", limit=str(limit))["data"]
    if as_json:
        show_json(found)
        return
    rows = [
        {
            **one,
            "when": when(one["at"]),
            "detail": ", ".join(f"{k} {v}" for k, v in one["detail"].items() if v)[:80],
        }
        for one in found
    ]
    show(rows, _COLUMNS, empty="nothing was changed yet")
