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

_PAGE = Path("build/loadtest")

TraceOption = Annotated[
    Path | None, typer.Argument(metavar="[TRACE]", help="JSON lines of arrivals.")
]
ZipfOption = Annotated[float, typer.Option(metavar="S", help="No trace: one of this skew...")]
AdaptersOption = Annotated[int, typer.Option(min=1, help="...over so many adapters...")]
RateOption = Annotated[float, typer.Option(help="...so many arrivals a second...")]
SecondsOption = Annotated[float, typer.Option(min=1, help="...for so long...")]
TenantsOption = Annotated[int, typer.Option(min=1, help="...of so many tenants...")]
PromptOption = Annotated[float, typer.Option(help="...prompts of this mean...")]
OutputOption = Annotated[float, typer.Option(help="...and outputs of this.")]
SeedOption = Annotated[int, typer.Option(help="Of that trace.")]
ReplicasOption = Annotated[int, typer.Option(min=1, help="Replicas.")]
SlotsOption = Annotated[int, typer.Option(min=1, help="Slots a replica has.")]
HostOption = Annotated[int, typer.Option(min=1, help="Adapters a replica keeps in memory.")]
CapacityOption = Annotated[int, typer.Option(min=1, help="Sequences a replica runs at once.")]
BaseOption = Annotated[Path | None, typer.Option(help="Model folder; a small random one if none.")]
StoreOption = Annotated[
    Path | None, typer.Option(help="Folder of that base's adapters, named as in the trace.")
]
GeneratorOption = Annotated[
    str, typer.Option(metavar="G,…", help=f"Of {', '.join(GENERATORS)}, in turn.")
]
LimitOption = Annotated[
    int | None, typer.Option(min=1, help="Each tenant's limit; refusals are then no fault.")
]
LateOption = Annotated[float, typer.Option(help="More lateness fails the run.")]
SkipOption = Annotated[float, typer.Option(min=0, max=0.9, help="First part not counted.")]
TitleOption = Annotated[str, typer.Option(help="Of the page.")]
NoteOption = Annotated[
    list[str] | None, typer.Option(help="A line for the page, as how the trace was scaled.")
]
OutOption = Annotated[Path, typer.Option("-o", help="Folder of what is written.")]


def main(
    trace: TraceOption = None,
    zipf: ZipfOption = 1.1,
    adapters: AdaptersOption = 48,
    rate: RateOption = 7.0,
    seconds: SecondsOption = 100.0,
    tenants: TenantsOption = 8,
    prompt_tokens: PromptOption = 64.0,
    output_tokens: OutputOption = 24.0,
    seed: SeedOption = 1,
    replicas: ReplicasOption = 2,
    slots: SlotsOption = 8,
    host: HostOption = 32,
    capacity: CapacityOption = 16,
    base: BaseOption = None,
    store: StoreOption = None,
    generator: GeneratorOption = "locust",
    requests_per_min: LimitOption = None,
    late_p99_ms: LateOption = 50.0,
    skip: SkipOption = 0.1,
    title: TitleOption = "",
    note: NoteOption = None,
    out: OutOption = _PAGE,
) -> None:
    """Replay a trace against `loraplex up` on this machine, and report."""
    if (base is None) != (store is None):
        usage("--base and --store go together")
    generators = tuple(generator.split(","))
    if unknown := [name for name in generators if name not in GENERATORS]:
        usage(f"{unknown[0]!r} is no generator: {', '.join(GENERATORS)}")
    lengths = (prompt_tokens, output_tokens)
    rows = or_usage(
        lambda: (
            _made(zipf, adapters, rate, seconds, tenants, lengths, seed)
            if trace is None
            else traces.read(trace)
        )
    )
    made = f"Zipf {zipf}, {adapters} adapters, {rate:g}/s" if trace is None else trace.name
    if not rows:
        usage("the trace is empty")
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
        generators=generators,
        late_p99_ms=late_p99_ms,
        requests_per_min=requests_per_min,
        skip=skip,
        notes=tuple(note or ()),
    )
    _test(test, out, shlex.join(["python", "-m", "loadtests.loadtest", *sys.argv[1:]]))


def _made(
    zipf: float,
    adapters: int,
    rate: float,
    seconds: float,
    tenants: int,
    lengths: tuple[float, float],
    seed: int,
) -> Trace:
    recipe = Recipe(
        seed=seed,
        arrivals=max(round(rate * seconds), 1),
        rate_per_s=rate,
        adapters=adapters,
        skew=zipf,
        tenants=tenants,
        prompt_tokens_mean=lengths[0],
        prompt_tokens_max=1024,  # half of the small base's context
        output_tokens_mean=lengths[1],
    )
    return tuple(generate(recipe))


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
