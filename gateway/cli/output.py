"""How commands print data: a table for people, or with `--json` the same data for programs."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

Row = Mapping[str, Any]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def show(rows: Sequence[Row], columns: Sequence[str], *, empty: str) -> None:
    """A plain table with aligned columns; numbers to the right. `empty` is said of no rows."""
    if not rows:
        print(empty)
        return
    print(table(rows, columns))


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    body = [[text(row.get(column)) for column in columns] for row in rows]
    numeric = [all(_number(row.get(column)) for row in rows) for column in columns]
    widths = [max(map(len, cells)) for cells in zip(columns, *body, strict=True)]
    lines = []
    for cells in ([column.replace("_", " ") for column in columns], *body):
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def show_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def csv_text(rows: Sequence[Row], columns: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows([dict(row) for row in rows])
    return out.getvalue()


def text(value: Any) -> str:
    """One cell: lists joined, nothing as `-`, floats short."""
    match value:
        case None | "" | [] | ():
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
        case int():
            return f"{value:,}"
        case list() | tuple():
            return ", ".join(map(text, value))
    return str(value)


def left(limits: Sequence[Row], name: str) -> str:
    """One limit of `tenants/{id}/quota`, over all adapters."""
    for line in limits:
        if line["name"] == name and not line["model"]:
            return f"{line['remaining']:,} of {line['limit']:,}"
    return "no limit"


def when(at: float) -> str:
    """Seconds since 1970, for people."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def note(message: str) -> None:
    """Progress and remarks go to stderr, so that stdout stays data."""
    print(message, file=sys.stderr, flush=True)


def _number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
