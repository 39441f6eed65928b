"""`loraplex bench …`: measurements of the engine's parts, programs that take this one's place.

They run where the GPU is and print their own `--help`; nothing of a tensor library is loaded here.
"""

from __future__ import annotations

import os
import sys

import typer

from gateway.cli.extra import require_replica


def kernels(context: typer.Context) -> None:
    """The gathered-LoRA kernels by cell, beside floors and peers; `--help` lists the options."""
    require_replica()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "replica.bench.kernels", *context.args])
