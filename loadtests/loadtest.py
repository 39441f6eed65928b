"""A load test from nothing: `make loadtest`, or `python -m loadtests.loadtest --help`.

Starts `loraplex up` with replicas of a small random base (or of one that is given), replays a Zipf
trace (or one that is given) with Locust, open loop, ends everything, and leaves in a folder

    report.html    one page that opens anywhere
    requests.csv   a line a request
    replicas.csv   what the replicas counted, each second
    figures.json   the figures, what was asked for, and prices that fit the replicas' steps
    trace.jsonl    what was replayed

Exit code 1 when a request failed or the generator fell behind.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtests import trace as traces
from loadtests.live_test import GENERATORS, GeneratorFailed, LiveTest, run, write
from loadtests.recipe import Recipe, generate
from loadtests.trace import Trace
from loadtests.up_fleet import Shape
from loadtests.usage import or_usage, usage


def main(
    trace: Annotated[
        Path | None, typer.Argument(metavar="[TRACE]", help="JSON lines of arrivals.")
    ] = None,
    zipf: Annotated[float, typer.Option(metavar="S", help="No trace: one of this skew...")] = 1.1,
    adapters: Annotated[int, typer.Option(min=1, help="...over so many adapters...")] = 48,
    rate: Annotated[float, typer.Option(help="...so many arrivals a second...")] = 7.0,
    seconds: Annotated[float, typer.Option(min=1, help="...for so long...")] = 100.0,
    tenants: Annotated[int, typer.Option(min=1, help="...of so many tenants...")] = 8,
    prompt_tokens: Annotated[float, typer.Option(help="...prompts of this mean...")] = 64.0,
    output_tokens: Annotated[float, typer.Option(help="...and outputs of this.")] = 24.0,
    seed: Annotated[int, typer.Option(help="Of that trace.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 2,
    slots: Annotated[int, typer.Option(min=1, help="Slots a replica has.")] = 8,
    host: Annotated[int, typer.Option(min=1, help="Adapters a replica keeps in memory.")] = 32,
    capacity: Annotated[int, typer.Option(min=1, help="Sequences a replica runs at once.")] = 16,
    base: Annotated[
        Path | None, typer.Option(help="Model folder; a small random one if none.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder of that base's adapters, named as in the trace.")
    ] = None,
    generator: Annotated[
        str, typer.Option(metavar="G,…", help=f"Of {', '.join(GENERATORS)}, in turn.")
    ] = "locust",
    requests_per_min: Annotated[
        int | None, typer.Option(min=1, help="Each tenant's limit; refusals are then no fault.")
    ] = None,
    late_p99_ms: Annotated[float, typer.Option(help="More lateness fails the run.")] = 50.0,
    skip: Annotated[float, typer.Option(min=0, max=0.9, help="First part not counted.")] = 0.1,
    title: Annotated[str, typer.Option(help="Of the page.")] = "",
    note: Annotated[
        list[str] | None, typer.Option(help="A line for the page, as how the trace was scaled.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", help="Folder of what is written.")] = Path(
        "build/loadtest"
    ),
) -> None:
    """Replay a trace against `loraplex up` on this machine, and report."""
    if (base is None) != (store is None):
        usage("--base and --store go together")
    if unknown := [name for name in generator.split(",") if name not in GENERATORS]:
        usage(f"{unknown[0]!r} is no generator: {', '.join(GENERATORS)}")
    recipe = or_usage(
        lambda: Recipe(
            seed=seed,
            arrivals=max(round(rate * seconds), 1),
            rate_per_s=rate,
            adapters=adapters,
            skew=zipf,
            tenants=tenants,
            prompt_tokens_mean=prompt_tokens,
            prompt_tokens_max=1024,  # half of the small base's context
            output_tokens_mean=output_tokens,
        )
    )
    rows: Trace = tuple(generate(recipe)) if trace is None else or_usage(lambda: traces.read(trace))
    made = f"Zipf {zipf}, {adapters} adapters, {rate:g}/s" if trace is None else trace.name
    test = LiveTest(
        trace=rows,
        title=title or f"Load test: {made}",
        shape=Shape(
            replicas=replicas,
            slots=slots,
            host=host,
            capacity=capacity,
            base=base,
            adapters=store,
        ),
        generators=tuple(generator.split(",")),
        late_p99_ms=late_p99_ms,
        requests_per_min=requests_per_min,
        skip=skip,
        notes=tuple(note or ()),
    )
    command = shlex.join(["python", "-m", "loadtests.loadtest", *sys.argv[1:]])
    _test(test, out, command)


def _test(test: LiveTest, out: Path, command: str) -> None:
    typer.echo(f"{test.title}: {len(test.trace)} requests over {test.trace[-1].at_s:.0f} s")
    try:
        told = write(test, asyncio.run(run(test)), out, command)
    except (GeneratorFailed, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    for line in _in_short(told):
        typer.echo(line)
    typer.echo(f"report: {out / 'report.html'}")
    for fault in told["faults"]:
        typer.echo(f"FAILED: {fault}", err=True)
    raise typer.Exit(int(bool(told["faults"])))


def _in_short(told: dict[str, Any]) -> list[str]:
    tiers = ", ".join(f"{tier} {share:.1%}" for tier, share in told["tiers"].items())
    rows = [f"{told['sent']} counted, {told['failed']} failed; found in {tiers}"]
    for name, ttft in told["ttft_ms_by_generator"].items():
        rows.append(f"first token, {name}: p50 {ttft['p50']:.1f} ms, p99 {ttft['p99']:.1f} ms")
    late = told["late_ms"]
    rows.append(f"lateness of the generator: p50 {late['p50']:.2f} ms, p99 {late['p99']:.2f} ms")
    prices = " ".join(f"{name}={value:.4g}" for name, value in told["prices"].items())
    rows.append(f"prices of a replica: {prices}")
    return rows


if __name__ == "__main__":
    typer.run(main)
