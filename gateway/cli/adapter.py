"""`loraplex adapter …`: what the fleet serves, and where each adapter is."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import quote

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.output import JsonFlag, show, show_json

_COLUMNS: Final = ("adapter", "status", "rank", "size_bytes", "digest", "replicas")
_PLACES: Final = ("replica", "tier", "status", "rank", "size_bytes", "running", "digest", "reason")


def list_all(gateway: GatewayOption = "", as_json: JsonFlag = False) -> None:
    """Every adapter, with its state and the replicas that know it."""
    with admin(gateway) as api:
        adapters = api.get("adapters")["data"]
    if as_json:
        show_json(adapters)
        return
    show(adapters, _COLUMNS, empty="no adapters; put a PEFT folder into the replicas' --adapters")


def show_one(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER")],
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """One adapter: in which tier on which replica, and why it was refused if it was."""
    with admin(gateway) as api:
        found = api.get(f"adapters/{quote(adapter, safe='')}")
    if as_json:
        show_json(found)
        return
    show(found["places"], _PLACES, empty=f"no replica knows {adapter}")
