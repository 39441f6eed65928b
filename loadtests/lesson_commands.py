"""`loraplex lesson`: the two worked examples of the field's lesson, reproduced.

The second needs tensors, which nothing here loads: it is a program of the replica's that takes
this one's place.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Annotated

import typer

from gateway.cli.extra import require_replica
from gateway.cli.failure import Failure
from loadtests.lesson import SETTINGS, Hits, Lesson, hits
from loadtests.usage import JsonFlag, show

app = typer.Typer(no_args_is_help=True, help=__doc__, rich_markup_mode=None)

_HEAD = "GPU slots  host slots  GPU hit  host hit  disk loads  mean wait"


@app.command(epilog="Example: loraplex lesson cache --slots 64 --host 250")
def cache(
    slots: Annotated[int | None, typer.Option(min=1, help="GPU slots, beside the table's.")] = None,
    host: Annotated[int, typer.Option(min=1, help="Host slots under those.")] = 500,
    adapters: Annotated[int, typer.Option(min=1, help="Adapters.")] = 500,
    requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 50_000,
    zipf: Annotated[float, typer.Option(min=0, help="Skew of their popularity.")] = 1.1,
    json: JsonFlag = False,
) -> None:
    """Where requests find their adapters: why host memory comes before more GPU slots."""
    lesson = Lesson(adapters=adapters, requests=requests, skew=zipf)
    asked = (*SETTINGS, (slots, host)) if slots else SETTINGS
    rows = [hits(lesson, gpu_slots=gpu, host_slots=behind) for gpu, behind in asked]
    if json:
        show({"rows": [asdict(row) for row in rows]}, json)
        return
    print(f"{requests:,} requests for {adapters} adapters, Zipf {zipf:g}; a copy from host memory "
          f"{lesson.host_ms:g} ms, from disk {lesson.disk_ms:g} ms.\n")  # fmt: skip
    print("\n".join([_HEAD, *map(_line, rows)]))
    few, many = rows[1], rows[2]
    print(
        f"\nWith the whole working set in host memory {few.gpu_slots} slots wait "
        f"{many.mean_wait_ms:.2f} ms, not {few.mean_wait_ms:.2f} ms: host memory first, "
        "then GPU slots."
        f"\nThe fleet: {adapters} dedicated replicas, idle but for {100 / adapters:.1f} % of the "
        "traffic each on average, or 6 shared ones that hold every adapter in host memory."
    )


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def batching(context: typer.Context) -> None:
    """Rows of many adapters in one batch: the same outputs as merged one after another."""
    try:
        require_replica()
    except Failure as failure:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(failure.code) from failure
    sys.stdout.flush()
    program = [sys.executable, "-m", "replica.bench.batching"]
    os.execv(sys.executable, [*program, *context.args])


def _line(row: Hits) -> str:
    return (
        f"{row.gpu_slots:>9}  {row.host_slots:>10}  {row.gpu_hit:>6.1%}  {row.host_hit:>7.1%}  "
        f"{row.disk_loads:>10}  {row.mean_wait_ms:>6.2f} ms"
    )
