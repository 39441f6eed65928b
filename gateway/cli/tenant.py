"""`loraplex tenant …`: who may call, how much, which models, with which keys. Changes are live."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.failure import Failure, usage_failure
from gateway.cli.limit_options import Money, Number, flat, limits_of
from gateway.cli.output import JsonFlag, note, show, show_json, table, when

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
AdapterOption = Annotated[
    str, typer.Option(metavar="NAME", help="The limits named are this adapter's alone.")
]
ShadowOption = Annotated[
    bool | None,
    typer.Option("--shadow/--enforce", help="Only count what is over the limits, or refuse it."),
]
YesFlag = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


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
        path = _path(tenant)
        found, quota = api.get(path), api.get(f"{path}/quota")
    found["left"] = {name: quota[name] for name in ("limits", "degraded")}
    if as_json:
        show_json(found)
        return
    _print(found)


def create(
    tenant: TenantArgument,
    weight: WeightOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = "",
    requests_per_min: Number = None,
    tokens_per_min: Number = None,
    input_tokens_per_min: Number = None,
    output_tokens_per_min: Number = None,
    concurrency: Number = None,
    tokens_per_day: Number = None,
    tokens_per_month: Number = None,
    spend_per_day: Money = None,
    spend_per_month: Money = None,
    shadow: ShadowOption = None,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Make a tenant; without limits it has none. It still needs a key."""
    body = _fields(locals())
    with admin(gateway) as api:
        made = api.post("tenants", {"id": tenant, **body})
    _report(made, as_json)
    note(f"next: `loraplex tenant key-create {tenant}`")


def set_fields(
    tenant: TenantArgument,
    weight: WeightOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = "",
    requests_per_min: Number = None,
    tokens_per_min: Number = None,
    input_tokens_per_min: Number = None,
    output_tokens_per_min: Number = None,
    concurrency: Number = None,
    tokens_per_day: Number = None,
    tokens_per_month: Number = None,
    spend_per_day: Money = None,
    spend_per_month: Money = None,
    shadow: ShadowOption = None,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Change what is named and leave the rest. `--model '*'` allows all."""
    body = _fields(locals())
    if not body:
        raise usage_failure("nothing to set: name at least one of the options.")
    with admin(gateway) as api:
        changed = api.patch(_path(tenant), body)
    _report(changed, as_json)


def delete(tenant: TenantArgument, yes: YesFlag = False, gateway: GatewayOption = "") -> None:
    """Remove a tenant and its keys; its usage stays on record."""
    confirmed(yes, f"Remove tenant {tenant} and all its keys?")
    with admin(gateway) as api:
        api.delete(_path(tenant))
    note(f"removed {tenant}")


def key_create(
    tenant: TenantArgument, gateway: GatewayOption = "", as_json: JsonFlag = False
) -> None:
    """Make an API key. The secret is printed now and never again: only its hash is kept."""
    with admin(gateway) as api:
        made = api.post(f"{_path(tenant)}/keys")
    _secret(made, as_json)


def key_rotate(
    tenant: TenantArgument,
    key: KeyArgument,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", help="The old key works on for so long.")
    ] = 0.0,
    yes: YesFlag = False,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Make a key in place of one, which ends now or after --grace. The secret is shown once."""
    if grace == 0:
        confirmed(yes, f"Key {key} of {tenant} stops working now (--grace gives it time). Go on?")
    with admin(gateway) as api:
        made = api.post(f"{_path(tenant)}/keys/{quote(key, safe='')}/rotate", {"grace_s": grace})
    _secret(made, as_json)
    note(f"key {key} " + (f"ends in {grace:g} s" if grace else "has ended"))


def key_revoke(
    tenant: TenantArgument,
    key: KeyArgument,
    yes: YesFlag = False,
    gateway: GatewayOption = "",
) -> None:
    """Make a key worthless, at once."""
    confirmed(yes, f"Key {key} of {tenant} stops working now. Go on?")
    with admin(gateway) as api:
        api.delete(f"{_path(tenant)}/keys/{quote(key, safe='')}")
    note(f"revoked {key}")


def confirmed(yes: bool, question: str) -> None:
    """Raises Failure unless it is meant."""
    if not yes and not typer.confirm(question):
        raise Failure("nothing was changed.")


def _path(tenant: str) -> str:
    return f"tenants/{quote(tenant, safe='')}"


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a change: only what was named."""
    limits = limits_of({n: v for n, v in options.items() if "_per_" in n or n == "concurrency"})
    weight, models, body = options["weight"], options["model"], dict[str, Any]()
    if weight is not None:
        if not math.isfinite(weight):
            raise usage_failure(f"--weight {weight}: a finite number above 0.")
        body["weight"] = weight
    if models:
        body["models"] = models
    if options["shadow"] is not None:
        body["shadow"] = options["shadow"]
    if options["adapter"] and not limits:
        raise usage_failure("--adapter needs at least one limit that is for it.")
    if limits:
        own = options["adapter"]
        body |= {"adapter_limits": {own: limits}} if own else {"limits": limits}
    return body


def _secret(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(made)
        return
    print(made["secret"])
    note(f"key {made['id']} of {made['tenant']}; it is not shown again")


def _report(tenant: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(tenant)
    else:
        print(table([_flat(tenant)], _COLUMNS))


def _print(tenant: dict[str, Any]) -> None:
    print(table([_flat(tenant)], ("id", "weight", "models", "shadow")))
    print()
    rows = [
        {
            "limit": line["name"].replace("_", " "),
            "of_adapter": line["model"],
            "allowed": line["limit"],
            "left": line["remaining"],
        }
        for line in tenant["left"]["limits"]
    ]
    show(rows, ("limit", "of_adapter", "allowed", "left"), empty="no limits")
    if tenant["left"]["degraded"]:
        note("the store does not answer: what is left is this gateway's own count")
    print()
    keys = [
        key | {"created": when(key["created"]), "expires": key["expires"] and when(key["expires"])}
        for key in tenant["keys"]
    ]
    show(keys, ("id", "prefix", "created", "expires"), empty="no keys")


def _flat(tenant: dict[str, Any]) -> dict[str, Any]:
    return {**tenant, **flat(tenant["limits"])}
