"""`loraplex adapter add` and `remove`: an adapter from its path to routable, and out again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from gateway.cli.adapter import AdapterArgument
from gateway.cli.adapter_check import version_of
from gateway.cli.client import Admin, GatewayOption, admin
from gateway.cli.failure import Failure, usage_failure
from gateway.cli.output import JsonFlag, note, show_json
from gateway.cli.tenant import YesFlag, confirmed
from shared.clock import monotonic

_ASK_S: Final = 0.5

WaitOption = Annotated[
    float, typer.Option("--wait", metavar="SECONDS", min=0, help="For it to come about; 0: do not.")
]


def add(
    adapter: AdapterArgument,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Folder or address, as servers see it.")
    ],
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of its base: PATH is checked against it first."),
    ] = None,
    digest: Annotated[
        str, typer.Option(metavar="DIGEST", help="Of the content, where it cannot be read here.")
    ] = "",
    remark: Annotated[str, typer.Option("--note", metavar="TEXT", help="One line.")] = "",
    wait_s: WaitOption = 120.0,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Add an adapter, or a new version of it, and wait until it is routable.

    Every server that takes loads is given it; what a replica of ours would refuse is not sent to
    any, since not every server checks. Exit code 1, with a server's own reason, when none
    has taken it in that time; the record stays, and the gateway goes on trying.
    """
    if (base is None) == (not digest):
        raise usage_failure(
            "name one: --base DIR, to check PATH here and read its version, or --digest."
        )
    if base is not None:
        digest = version_of(Path(path), base)
    with admin(gateway) as api:
        body = {"digest": digest, "path": path, "note": remark}
        found = api.post(f"{_where(adapter)}/versions", body)
        wanted = found["record"]["current"]
        if wait_s:
            found = _routable(api, adapter, wanted, wait_s)
    if as_json:
        show_json(found)
    else:
        places = [one["replica"] for one in found["places"] if _serves(one, wanted)]
        note(f"{adapter} is version {wanted[:12]}, on {', '.join(places) or 'no server yet'}")


def remove(
    adapter: AdapterArgument,
    yes: YesFlag = False,
    wait_s: WaitOption = 120.0,
    gateway: GatewayOption = "",
) -> None:
    """Remove an adapter: its record at once, and from servers when none of its requests runs.

    A server that lists it of its own, or was started with it, keeps serving it.
    """
    confirmed(yes, f"Remove {adapter} from the registry and from the servers it was loaded on?")
    with admin(gateway) as api:
        api.delete(_where(adapter))
        until = monotonic() + wait_s
        while (left := _places(api, adapter)) and monotonic() < until:
            time.sleep(_ASK_S)
    note(f"removed {adapter}" + (f"; still served by {', '.join(left)}" if left else ""))


def _routable(api: Admin, adapter: str, wanted: str, wait_s: float) -> dict[str, Any]:
    until = monotonic() + wait_s
    while True:
        found: dict[str, Any] = api.get(_where(adapter))
        if any(_serves(one, wanted) for one in found["places"]):
            return found
        if monotonic() >= until:
            raise Failure(_reason(adapter, found["places"]))
        time.sleep(_ASK_S)


def _reason(adapter: str, places: list[dict[str, Any]]) -> str:
    refused = [f"{one['replica']}: {one['reason']}" for one in places if one["reason"]]
    return f"{adapter} is not routable. " + (
        "; ".join(refused)
        or "No server has taken it: `loraplex top` shows which are up; with several bases, "
        "fleet.replicas[].deploy says which adapters belong where."
    )


def _serves(place: dict[str, Any], wanted: str) -> bool:
    digest: str = place["digest"].rpartition(":")[2]
    return place["status"] != "failed" and digest.startswith(wanted)


def _places(api: Admin, adapter: str) -> list[str]:
    found = api.get("adapters")["data"]
    return [place for one in found if one["adapter"] == adapter for place in one["replicas"]]


def _where(adapter: str) -> str:
    return f"adapters/{quote(adapter, safe='')}"
