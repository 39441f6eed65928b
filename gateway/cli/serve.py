"""`loraplex gateway …` and `loraplex replica …`: the processes themselves, options and all.

They replace this process, so that a supervisor's signals and exit codes are theirs, and their own
`--help` is what one reads.
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


def _become(package: str, arguments: list[str]) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", package, *arguments])
