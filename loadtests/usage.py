"""What the commands share: options, bad usage as exit code 2, data as JSON or for people."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import orjson
import typer

T = TypeVar("T")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines of arrivals.")]


def or_usage(work: Callable[[], T]) -> T:
    """The result of `work`; its ValueError ends the program as wrong usage."""
    try:
        return work()
    except ValueError as error:
        usage(str(error))


def usage(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def note(message: str) -> None:
    """Progress goes to stderr, so that stdout stays data."""
    typer.echo(message, err=True)


def write(data: bytes, path: Path | None) -> None:
    """To a file, or to standard output."""
    if path is None:
        sys.stdout.buffer.write(data)
        return
    try:
        path.write_bytes(data)
    except OSError as error:
        usage(f"{path}: {error.strerror}")


def show(values: dict[str, Any], json: bool) -> None:
    if json:
        typer.echo(orjson.dumps(values, option=orjson.OPT_INDENT_2))
        return
    for name, value in values.items():
        if isinstance(value, dict):
            typer.echo(f"{name}:")
            for key, inner in value.items():
                typer.echo(f"  {key:<14} {_text(inner)}")
        else:
            typer.echo(f"{name:<24} {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
