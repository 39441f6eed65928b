"""`loraplex explain`: where a request would go now, and why. Nothing is sent."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.output import JsonFlag, note, show, show_json
from gateway.cli.report import explained


def explain(
    tenant: Annotated[str, typer.Option(metavar="T", help="Who would ask.")],
    model: Annotated[str, typer.Option(metavar="M", help="An adapter's name, or the base's.")],
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Which replica would serve this now, and the terms it won by."""
    with admin(gateway) as api:
        found = api.get("explain", tenant=tenant, model=model)
    if as_json:
        show_json(found)
        return
    rows = explained(found)
    show(rows, list(rows[0]) if rows else [], empty="no replica could serve it")
    if owners := found.get("owners"):
        note(f"planned owners: {', '.join(owners)}")
