"""`loraplex gateway …`, `replica …`, `trace …`, `plan …`, `lesson …`, `simulate …`: others.

Each is a package's own program, which the gateway must not import. They replace this process, so
that a supervisor's signals and exit codes are theirs, and their own `--help` is what one reads.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import typer

from gateway.cli.extra import require_replica

PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
_ONLY_PRINTS: Final = frozenset({"--help", "--example-config"})


def gateway(context: typer.Context) -> None:
    """Run one gateway; `loraplex gateway --help` lists its options."""
    _become("gateway", context.args)


def replica(context: typer.Context) -> None:
    """Run one replica; `loraplex replica --help` lists its options."""
    if not _ONLY_PRINTS.intersection(context.args):
        require_replica()
    _become("replica", context.args)


def trace(context: typer.Context) -> None:
    """Make, convert and describe traces; `loraplex trace --help` lists how."""
    _become("loadtests", ["trace", *context.args])


def lesson(context: typer.Context) -> None:
    """The two worked examples of the field's lesson; `loraplex lesson --help` lists them."""
    _become("loadtests", ["lesson", *context.args])


def simulate(context: typer.Context) -> None:
    """A trace through the cores under virtual time; `loraplex simulate --help` says how."""
    _become("loadtests", ["simulate", *context.args])


def plan(context: typer.Context) -> None:
    """Replicas, slots and host memory for a load, and why; `loraplex plan --help` says how."""
    _become("loadtests", ["plan", *context.args])


def _become(package: str, arguments: list[str]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", package, *arguments])
