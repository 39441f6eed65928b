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
    _become("kernels", context)


def engine(context: typer.Context) -> None:
    """The whole engine's tokens a second, beside vLLM's on the same work; `--help` has options."""
    _become("engine", context)


def residency(context: typer.Context) -> None:
    """Many adapters on the pages of a few, against all of them resident; `--help` has options."""
    _become("residency", context)


def agreement(context: typer.Context) -> None:
    """The GPU's logits against the CPU's in float32, alone and mixed; `--help` has options."""
    _become("agreement", context)


def _become(program: str, context: typer.Context) -> None:
    require_replica()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"replica.bench.{program}", *context.args])
