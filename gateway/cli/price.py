"""`loraplex price …`: what tokens cost, by tenant and model. A new price changes no old bill."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import quote

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.output import JsonFlag, note, show, show_json
from gateway.cli.tenant import YesFlag, confirmed

_COLUMNS: Final = ("tenant", "model", "input", "cached_input", "output")

TenantOption = Annotated[str, typer.Option(metavar="TENANT", help="`*`: every tenant.")]
ModelOption = Annotated[str, typer.Option(metavar="NAME", help="Adapter or base; `*`: every one.")]
PerMillion = Annotated[float, typer.Option(metavar="AMOUNT", help="For a million tokens.")]


def list_all(gateway: GatewayOption = "", as_json: JsonFlag = False) -> None:
    """The price table; of several that fit, the tenant's own comes first, then the model's."""
    with admin(gateway) as api:
        prices = api.get("prices")["data"]
    if as_json:
        show_json(prices)
        return
    show(prices, _COLUMNS, empty="no prices; all is free. `loraplex price set` makes one")


def set_one(
    input: PerMillion,
    output: PerMillion,
    cached_input: Annotated[
        float | None, typer.Option(metavar="AMOUNT", help="For a million; default: as --input.")
    ] = None,
    tenant: TenantOption = "*",
    model: ModelOption = "*",
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Set the price of a million tokens, from now on."""
    body = {"input": input, "cached_input": cached_input, "output": output}
    with admin(gateway) as api:
        made = api.put(_path(tenant, model), body)
    if as_json:
        show_json(made)
        return
    show([made], _COLUMNS, empty="")


def delete(
    tenant: TenantOption = "*",
    model: ModelOption = "*",
    yes: YesFlag = False,
    gateway: GatewayOption = "",
) -> None:
    """Take a price out of the table."""
    confirmed(yes, f"No price any more for tenant {tenant} and model {model}?")
    with admin(gateway) as api:
        api.delete(_path(tenant, model))
    note("removed")


def _path(tenant: str, model: str) -> str:
    return f"prices/{quote(tenant, safe='')}/{quote(model, safe='')}"
