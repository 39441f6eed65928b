"""`loraplex usage`: what was used, exported and checked against what the replicas say."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.cli.client import Admin, GatewayOption, admin
from gateway.cli.export import Columns, Form, write
from gateway.cli.failure import FAILED, Failure, usage_failure
from gateway.cli.output import JsonFlag, csv_text, note, show, show_json
from gateway.cli.tenant import YesFlag, confirmed
from shared.clock import wall

_PAGE: Final = 5000
_DAY_S: Final = 86_400
_TEXTS: Final = ("tenant", "adapter", "version", "replica", "hour")
_VERDICTS: Final = (
    *("replica", "verdict", "generated", "billed", "difference"),
    *("counted_requests", "estimated_requests", "estimated_tokens", "running", "reason"),
)
RECORD: Final[Columns] = {
    "id": str,
    "at": float,
    "request": str,
    "tenant": str,
    "adapter": str,
    "digest": str,
    "replica": str,
    "boot": str,
    "outcome": str,
    "prompt_tokens": int,
    "cached_tokens": int,
    "completion_tokens": int,
    "estimated": bool,
    "spend": float,
    "queue_s": float,
    "first_token_s": float,
    "total_s": float,
}


class Format(StrEnum):
    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


FromOption = Annotated[
    str | None, typer.Option("--from", metavar="TIME", help="ISO 8601; default: the last day.")
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="TIME", help="ISO 8601; default: now.")
]
OutputOption = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Where to; Parquet needs one.")
]


def usage(
    context: typer.Context,
    start: FromOption = None,
    end: ToOption = None,
    by: Annotated[
        str, typer.Option(metavar="NAMES", help="Of tenant, adapter, version, replica, hour.")
    ] = "tenant,adapter",
    form: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.TABLE,
    output: OutputOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    gateway: GatewayOption = "",
) -> None:
    """Requests, tokens and money of each tenant and adapter, by the hour."""
    if context.invoked_subcommand is not None:
        return
    _check(start, end)
    if form is Format.PARQUET and output is None:
        raise usage_failure("--format parquet needs --output FILE.")
    with admin(gateway) as api:
        rows = api.get("usage", **{"from": start, "to": end, "by": by})["data"]
    columns = list(rows[0]) if rows else []
    if output is not None:
        kinds = {name: _kind(name) for name in columns}
        write(iter(rows), kinds, Form(form if form is not Format.TABLE else Format.CSV), output)
        note(f"{len(rows)} rows in {output}")
    elif as_json or form is Format.JSON:
        show_json(rows)
    elif form is Format.CSV:
        print(csv_text(rows, columns), end="")
    else:
        show(rows, columns, empty="nothing was used in that time")


def export(
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="Where to.")],
    start: FromOption = None,
    end: ToOption = None,
    form: Annotated[Form, typer.Option("--format", help="json: one record a line.")] = Form.CSV,
    trim: Annotated[
        bool, typer.Option("--trim", help="Then forget the records in the store.")
    ] = False,
    yes: YesFlag = False,
    gateway: GatewayOption = "",
) -> None:
    """Every record, one a request. With --trim they are kept in FILE alone (their sums stay)."""
    _check(start, end)
    if trim and (start or end):
        raise usage_failure("--trim takes the whole ledger: leave --from and --to out.")
    if trim:
        confirmed(yes, f"Forget the exported records, once they are in {output}?")
        start, end = "0", str(round(wall() + _DAY_S))  # a gateway's clock may be ahead
    pages = _Pages(start, end)
    with admin(gateway) as api:
        count = write(pages.rows(api), RECORD, form, output)
        note(f"{count} records in {output}")
        if trim and pages.last:
            trimmed = api.post("usage/trim", {"through": pages.last})["trimmed"]
            note(f"{trimmed} records forgotten in the store")


def reconcile(gateway: GatewayOption = "", as_json: JsonFlag = False) -> None:
    """The bill against the replicas' own counters. Exit code 1 when one differs."""
    with admin(gateway) as api:
        rows = api.get("usage/reconcile")["data"]
    if as_json:
        show_json(rows)
    else:
        show(rows, _VERDICTS, empty="the gateway knows no replicas")
    if wrong := [row["replica"] for row in rows if row["verdict"] == "differs"]:
        raise Failure(
            f"the bill differs for {', '.join(wrong)}: more generated than billed is somebody who "
            "calls the replica past the gateway, or lost records; less is a bill counted twice.",
            code=FAILED,
        )


class _Pages:
    """Records of the ledger, a page at a time; `last` is the id of the last one that was read."""

    def __init__(self, start: str | None, end: str | None) -> None:
        self._window = {"from": start, "to": end}
        self.last = ""

    def rows(self, api: Admin) -> Iterator[dict[str, Any]]:
        after: str | None = None
        while True:
            page = api.get("usage/records", after=after, limit=str(_PAGE), **self._window)
            yield from page["data"]
            self.last = page["next"] or (page["data"][-1]["id"] if page["data"] else self.last)
            after = page["next"]
            if after is None:
                return


def _kind(column: str) -> type:
    return str if column in _TEXTS else float if column == "spend" else int


def _check(start: str | None, end: str | None) -> None:
    """The gateway would answer a time that runs backwards with nothing, which reads as no use."""
    began_at = None if start is None else _seconds("--from", start)
    ended_at = wall() if end is None else _seconds("--to", end)
    if began_at is not None and began_at > ended_at:
        until = "now" if end is None else f"--to {end}"
        raise usage_failure(f"--from {start} is later than {until}: give the earlier time first.")


def _seconds(flag: str, text: str) -> float:
    """As the gateway reads it: ISO 8601, UTC when it names no zone, or seconds since 1970."""
    try:
        if text.strip().replace(".", "", 1).isdecimal():
            return datetime.fromtimestamp(float(text), UTC).timestamp()
        at = datetime.fromisoformat(text.strip())
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        hint = "a time such as 2026-11-29T15:00Z, or seconds since 1970"
        raise usage_failure(f"{flag} {text!r}: not {hint}.") from None
