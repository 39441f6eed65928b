"""`loraplex adapter check`: everything that is wrong with an adapter, before it is deployed.

The checks are a replica's own, made by `python -m replica.adapter_check`, a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.cli.extra import require_replica
from gateway.cli.failure import Failure, usage_failure
from gateway.cli.output import JsonFlag, show_json

_RANK_MAX: Final = 1 << 16  # whether it is too high is each server's to say


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The adapter's folder.")],
    base: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of its base; without it shapes go unchecked."),
    ] = None,
    max_rank: Annotated[int, typer.Option(min=1, help="The replicas' max_lora_rank.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="The replicas' dtype.")] = Dtype.FLOAT32,
    as_json: JsonFlag = False,
) -> None:
    """Every fault and oddity of an adapter's folder, and what to do about each.

    Exit code 1 when a replica would refuse it.
    """
    require_replica()
    for name, folder in (("PATH", path), ("--base", base)):
        if folder is not None and not folder.is_dir():
            raise usage_failure(f"{name}: {folder} is no folder.")
    found = _run(path, base, max_rank, dtype)
    if as_json:
        show_json(found)
    else:
        print(describe(found))
    if found["servable"] is False:
        raise typer.Exit(1)


def version_of(path: Path, base: Path) -> str:
    """The digest of a folder's content. Raises Failure, with the faults, where it has any."""
    require_replica()
    for folder in (path, base):
        if not folder.is_dir():
            raise usage_failure(f"{folder} is no folder.")
    found = _run(path, base, _RANK_MAX, Dtype.FLOAT32)
    if not found["digest"]:
        raise Failure(describe(found))
    return str(found["digest"])


def describe(found: dict[str, Any]) -> str:
    """What people read: one line a finding, the verdict last."""
    lines = [found["adapter"]]
    for finding in found["findings"]:
        at = f" ({finding['param']})" if finding["param"] else ""
        lines.append(f"  {finding['level']}: {finding['code']}{at}")
        lines.append(f"      {finding['message']}")
    match found["servable"]:
        case True:
            lines.append(
                f"can be served: rank {found['rank']} on {', '.join(found['modules'])}; "
                f"version {found['digest'][:12]}"
            )
        case False:
            lines.append("cannot be served")
        case _:
            lines.append("no fault found without its base; name it with --base to compare shapes")
    return "\n".join(lines)


def _run(path: Path, base: Path | None, max_rank: int, dtype: Dtype) -> dict[str, Any]:
    """The JSON object that the check prints. Raises Failure with what it said instead."""
    command = [sys.executable, "-m", "replica.adapter_check", str(path)]
    command += ["--max-rank", str(max_rank), "--dtype", dtype.value]
    command += [] if base is None else ["--base", str(base)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        said = done.stderr.strip().splitlines()
        raise Failure(said[-1] if said else f"the check ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
