"""`loraplex tenant …`: who may call, how much, which models, with which keys. Changes are live."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.failure import Failure, usage_failure
from gateway.cli.output import JsonFlag, left, note, show, show_json, table, when

UNLIMITED: Final = "none"
_COLUMNS: Final = ("id", "weight", "requests_per_min", "tokens_per_min", "models")


def _given(name: str) -> Callable[[str], str]:
    """An empty word is refused here: in an address of the admin API it would name another thing."""

    def check(text: str) -> str:
        if not text.strip():
            raise usage_failure(f"{name} is empty: name one.")
        return text

    return check


TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", callback=_given("TENANT"))]
KeyArgument = Annotated[
    str,
    typer.Argument(metavar="KEY_ID", help="As `tenant show` lists it.", callback=_given("KEY_ID")),
]
WeightOption = Annotated[
    float | None, typer.Option(metavar="W", help="Share of the fleet when tenants compete.")
]
ModelOption = Annotated[
    list[str] | None,
    typer.Option("--model", metavar="NAME", help="May use this; repeat for more. Default: all."),
]
LimitOption = Annotated[str | None, typer.Option(metavar="N", help="A whole number, or `none`.")]


def list_all(gateway: GatewayOption = "", as_json: JsonFlag = False) -> None:
    """Every tenant with its limits."""
    with admin(gateway) as api:
        tenants = api.get("tenants")["data"]
    if as_json:
        show_json(tenants)
        return
    rows = [_flat(tenant) for tenant in tenants]
    show(rows, _COLUMNS, empty="no tenants yet; `loraplex tenant create NAME` makes one")


def show_one(
    tenant: TenantArgument, gateway: GatewayOption = "", as_json: JsonFlag = False
) -> None:
    """One tenant: limits, what is left of them, keys (never the secrets)."""
    with admin(gateway) as api:
        path = f"tenants/{quote(tenant, safe='')}"
        found, quota = api.get(path), api.get(f"{path}/quota")
    found["left"] = {name: quota[name] for name in ("requests", "tokens", "degraded")}
    if as_json:
        show_json(found)
        return
    _print(found)


def create(
    tenant: TenantArgument,
    weight: WeightOption = None,
    model: ModelOption = None,
    requests_per_min: LimitOption = None,
    tokens_per_min: LimitOption = None,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Make a tenant; without limits it has none. It still needs a key."""
    body = _fields(weight, model, requests_per_min, tokens_per_min)
    with admin(gateway) as api:
        made = api.post("tenants", {"id": tenant, **body})
    _report(made, as_json)
    note(f"next: `loraplex tenant key-create {tenant}`")


def set_fields(
    tenant: TenantArgument,
    weight: WeightOption = None,
    model: ModelOption = None,
    requests_per_min: LimitOption = None,
    tokens_per_min: LimitOption = None,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Change what is named and leave the rest. `--model '*'` allows all."""
    body = _fields(weight, model, requests_per_min, tokens_per_min)
    if not body:
        raise usage_failure("nothing to set: name at least one of the options.")
    with admin(gateway) as api:
        changed = api.patch(f"tenants/{quote(tenant, safe='')}", body)
    _report(changed, as_json)


def delete(
    tenant: TenantArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    gateway: GatewayOption = "",
) -> None:
    """Remove a tenant and its keys; its usage stays on record."""
    if not yes and not typer.confirm(f"Remove tenant {tenant} and all its keys?"):
        raise Failure("nothing was removed.")
    with admin(gateway) as api:
        api.delete(f"tenants/{quote(tenant, safe='')}")
    note(f"removed {tenant}")


def key_create(
    tenant: TenantArgument, gateway: GatewayOption = "", as_json: JsonFlag = False
) -> None:
    """Make an API key. The secret is printed now and never again: only its hash is kept."""
    with admin(gateway) as api:
        made = api.post(f"tenants/{quote(tenant, safe='')}/keys")
    if as_json:
        show_json(made)
        return
    print(made["secret"])
    note(f"key {made['id']} of {tenant}; it is not shown again")


def key_revoke(
    tenant: TenantArgument,
    key: KeyArgument,
    gateway: GatewayOption = "",
) -> None:
    """Make a key worthless, at once."""
    with admin(gateway) as api:
        api.delete(f"tenants/{quote(tenant, safe='')}/keys/{quote(key, safe='')}")
    note(f"revoked {key}")


def _fields(
    weight: float | None, models: list[str] | None, requests: str | None, tokens: str | None
) -> dict[str, Any]:
    """The body of a change: only what was named."""
    given = {"requests_per_min": requests, "tokens_per_min": tokens}
    limits = {name: _limit(name, text) for name, text in given.items() if text is not None}
    body: dict[str, Any] = {}
    if weight is not None:
        if not math.isfinite(weight):
            raise usage_failure(f"--weight {weight}: a finite number above 0.")
        body["weight"] = weight
    if models:
        body["models"] = models
    if limits:
        body["limits"] = limits
    return body


def _limit(name: str, text: str) -> int | None:
    if text == UNLIMITED:
        return None
    if not text.isdecimal():
        flag = f"--{name.replace('_', '-')}"
        raise usage_failure(f"{flag} {text}: a whole number, or `{UNLIMITED}` for no limit.")
    return int(text)


def _report(tenant: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(tenant)
    else:
        print(table([_flat(tenant)], _COLUMNS))


def _print(tenant: dict[str, Any]) -> None:
    lines = {f"{name}_left": left(tenant["left"][name]) for name in ("requests", "tokens")}
    print(table([_flat(tenant) | lines], (*_COLUMNS, *lines)))
    if tenant["left"]["degraded"]:
        note("the store does not answer: what is left is this gateway's own count")
    print()
    keys = [key | {"created": when(key["created"])} for key in tenant["keys"]]
    show(keys, ("id", "prefix", "created"), empty="no keys")


def _flat(tenant: dict[str, Any]) -> dict[str, Any]:
    limits = {
        name: UNLIMITED if limit is None else limit for name, limit in tenant["limits"].items()
    }
    return {**tenant, **limits}
