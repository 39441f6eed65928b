"""`loraplex replica-set …`: the replicas a gateway routes to, and taking one out of use."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import quote

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.output import JsonFlag, note, show, show_json

_COLUMNS: Final = (
    "replica",
    "state",
    "in_flight",
    "running",
    "waiting",
    "slots",
    "resident",
    "found_by",
)

ReplicaArgument = Annotated[str, typer.Argument(metavar="REPLICA", help="As `list` names it.")]


def list_all(gateway: GatewayOption = "", as_json: JsonFlag = False) -> None:
    """Every replica: state, load, and which adapters are in its slots."""
    with admin(gateway) as api:
        replicas = api.get("replicas")["data"]
    if as_json:
        show_json(replicas)
        return
    show(
        replicas,
        _COLUMNS,
        empty="the gateway knows no replicas: list them, name a service, or let them join",
    )


def drain(replica: ReplicaArgument, gateway: GatewayOption = "") -> None:
    """Send it nothing new; what runs there finishes."""
    with admin(gateway) as api:
        api.post(f"replicas/{quote(replica, safe='')}/drain")
    note(f"{replica} drains; `loraplex replica-set resume {replica}` takes it back")


def resume(replica: ReplicaArgument, gateway: GatewayOption = "") -> None:
    """Take a drained replica back into use."""
    with admin(gateway) as api:
        api.post(f"replicas/{quote(replica, safe='')}/resume")
    note(f"{replica} is in use again")
