"""`loraplex adapter …`: what the fleet serves and where, whose it is, which version counts."""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from gateway.cli.client import GatewayOption, admin
from gateway.cli.failure import usage_failure
from gateway.cli.output import JsonFlag, note, show, show_json, when
from gateway.cli.tenant import YesFlag, confirmed

_COLUMNS: Final = ("adapter", "status", "rank", "size_bytes", "digest", "owner", "replicas")
_PLACES: Final = ("replica", "tier", "status", "rank", "size_bytes", "running", "digest", "reason")
_VERSIONS: Final = ("version", "is", "path", "note", "added")

AdapterArgument = Annotated[str, typer.Argument(metavar="ADAPTER")]
DigestArgument = Annotated[
    str, typer.Argument(metavar="DIGEST", help="Of the content, 12 hexadecimal digits or more.")
]


def list_all(gateway: GatewayOption = "", as_json: JsonFlag = False) -> None:
    """Every adapter, with its state and the replicas that know it."""
    with admin(gateway) as api:
        adapters = api.get("adapters")["data"]
    if as_json:
        show_json(adapters)
        return
    rows = [one | {"owner": (one["record"] or {}).get("owner")} for one in adapters]
    show(rows, _COLUMNS, empty="no adapters; put a PEFT folder into the replicas' --adapters")


def show_one(
    adapter: AdapterArgument, gateway: GatewayOption = "", as_json: JsonFlag = False
) -> None:
    """One adapter: in which tier on which replica, why it was refused if it was, its versions."""
    with admin(gateway) as api:
        found = api.get(_path(adapter))
    if as_json:
        show_json(found)
        return
    show(found["places"], _PLACES, empty=f"no replica knows {adapter}")
    if found["record"] is not None:
        _show_record(found)


def set_fields(
    adapter: AdapterArgument,
    owner: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Whose it is; empty: the operator's.")
    ] = None,
    access: Annotated[
        list[str] | None,
        typer.Option(metavar="TENANT", help="May use it beside the owner; `*`: all; repeat."),
    ] = None,
    nobody_else: Annotated[bool, typer.Option("--private", help="Only the owner may.")] = False,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Say whose an adapter is and who may use it. To all others it then does not exist."""
    body: dict[str, Any] = {} if owner is None else {"owner": owner}
    if access and nobody_else:
        raise usage_failure("--private and --access are one or the other.")
    if access or nobody_else:
        body["access"] = access or []
    if not body:
        raise usage_failure("nothing to set: name --owner, --access or --private.")
    with admin(gateway) as api:
        _report(api.patch(_path(adapter), body), as_json)


def version(
    adapter: AdapterArgument,
    digest: DigestArgument,
    path: Annotated[str, typer.Option(metavar="PATH", help="As replicas load it.")] = "",
    remark: Annotated[str, typer.Option("--note", metavar="TEXT", help="One line.")] = "",
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Add a version; from now on the plain name means it, and nothing else is ever served."""
    with admin(gateway) as api:
        body = {"digest": digest, "path": path, "note": remark}
        _report(api.post(f"{_path(adapter)}/versions", body), as_json)


def rollback(
    adapter: AdapterArgument,
    to: Annotated[str, typer.Option(metavar="DIGEST", help="Default: the one before.")] = "",
    yes: YesFlag = False,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Let the plain name mean an earlier version again. What runs finishes on the one it has."""
    confirmed(yes, f"Serve {adapter} from {to or 'the version before'} on?")
    with admin(gateway) as api:
        body = {"digest": to} if to else {}
        _report(api.post(f"{_path(adapter)}/rollback", body), as_json)


def forget(adapter: AdapterArgument, yes: YesFlag = False, gateway: GatewayOption = "") -> None:
    """Remove the record of owner, access and versions; what replicas have of their own stays."""
    confirmed(yes, f"Forget owner, access and versions of {adapter}? All may use it then.")
    with admin(gateway) as api:
        api.delete(_path(adapter))
    note(f"forgot the record of {adapter}")


def _path(adapter: str) -> str:
    return f"adapters/{quote(adapter, safe='')}"


def _report(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(found)
    else:
        _show_record(found)


def _show_record(found: dict[str, Any]) -> None:
    record = found["record"]
    print(f"\nowner: {record['owner'] or 'the operator'}")
    print(f"may use it: {', '.join(record['access']) or 'nobody else'}\n")
    rows = [
        {
            "version": one["digest"][:12],
            "is": _is(found, one["digest"]),
            "path": one["path"],
            "note": one["note"],
            "added": when(one["created"]),
        }
        for one in record["versions"]
    ]
    show(rows, _VERSIONS, empty="no versions: whichever a replica serves counts")


def _is(found: dict[str, Any], digest: str) -> str:
    """Whether the plain name means this version, and whether anybody serves it."""
    if digest == found["record"]["current"]:
        return f"current, {found['status']}"
    served = any(other.rpartition(":")[2].startswith(digest) for other in found["others"])
    return f"served as {found['adapter']}@{digest[:12]}" if served else ""
