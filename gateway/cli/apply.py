"""`loraplex apply -f fleet.yaml`: make the registry what a file says; twice changes nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer
import yaml
from pydantic import ValidationError

from gateway.cli.client import Admin, GatewayOption, admin
from gateway.cli.desired import Change, FleetWish, changes
from gateway.cli.failure import USAGE, Failure
from gateway.cli.output import JsonFlag, note, show_json
from gateway.cli.tenant import YesFlag, confirmed

_BYTES_MAX: Final = 8 << 20


def apply(
    file: Annotated[
        Path, typer.Option("-f", "--file", metavar="FILE", help="YAML; `-` reads standard input.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change.")] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what a section of the file does not name.")
    ] = False,
    yes: YesFlag = False,
    gateway: GatewayOption = "",
    as_json: JsonFlag = False,
) -> None:
    """Create and change tenants, adapters' records and prices until they are as the file says.

    A field left out of the file stays as it is. Removing asks first. A change that somebody else
    made since this one read it is not overwritten.
    """
    wish = _read(file)
    with admin(gateway) as api:
        todo = changes(
            wish,
            tenants=api.get("tenants")["data"],
            adapters=api.get("adapters")["data"],
            prices=api.get("prices")["data"],
            prune=prune,
        )
        _show(todo, as_json)
        if dry_run or not todo:
            return
        removed = sum(change.verb == "-" for change in todo)
        if removed:
            confirmed(yes, f"{removed} of these are removed. Go on?")
        for done, change in enumerate(todo):
            try:
                _do(api, change)
            except Failure as failure:
                raise Failure(
                    f"{change.kind} {change.name}: {failure}. {done} of {len(todo)} changes were "
                    "made; run it again to go on."
                ) from None
    note(f"{len(todo)} changes made")


def _read(file: Path) -> FleetWish:
    """Raises a Failure that names the line or the field."""
    name = "standard input" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read(_BYTES_MAX) if str(file) == "-" else file.read_text()
        raw = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Failure(f"{name}: {error}", code=USAGE) from error
    try:
        return FleetWish.model_validate({} if raw is None else raw)
    except ValidationError as error:
        lines = [f"{name}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise Failure("\n".join(lines), code=USAGE) from error


def _show(todo: list[Change], as_json: bool) -> None:
    if as_json:
        show_json(
            [{"verb": c.verb, "kind": c.kind, "name": c.name, "changes": [*c.lines]} for c in todo]
        )
        return
    if not todo:
        print("nothing to change")
    for change in todo:
        print(f"{change.verb} {change.kind} {change.name}")
        for line in change.lines:
            print(f"    {line}")


def _do(api: Admin, change: Change) -> None:
    name, body = quote(change.name, safe=""), change.body or {}
    match change.kind, change.verb:
        case "tenant", "+":
            api.post("tenants", body)
        case "tenant", "~":
            api.patch(f"tenants/{name}", body, version=change.version)
        case "tenant", "-":
            api.delete(f"tenants/{name}", version=change.version)
        case "adapter", "-":
            api.delete(f"adapters/{name}", version=change.version)
        case "adapter", _:
            _adapter(api, f"adapters/{name}", body, change)
        case _, verb:
            tenant, model = (quote(part, safe="") for part in change.target)
            path = f"prices/{tenant}/{model}"
            api.delete(path) if verb == "-" else api.put(path, body)


def _adapter(api: Admin, path: str, body: Any, change: Change) -> None:
    """Access first: a version must not be open to more than it will be. Then each step carries the
    version that the one before has left."""
    current = api.patch(path, body, version=change.version)["record"]
    for one in change.versions:
        current = api.post(f"{path}/versions", one.model_dump(), version=current["version"])[
            "record"
        ]
    if change.current and current["current"] != change.current:
        api.post(f"{path}/rollback", {"digest": change.current}, version=current["version"])
