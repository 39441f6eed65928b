"""`loraplex trace`: make a trace, convert somebody else's, say what one is like."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from loadtests import trace as traces
from loadtests.convert import FORMATS, Conversion
from loadtests.convert import convert as convert_trace
from loadtests.description import describe as describe_trace
from loadtests.popularity import Popularity
from loadtests.portrait import portrait
from loadtests.recipe import Recipe
from loadtests.recipe import generate as generate_trace
from loadtests.tide import Tide
from loadtests.usage import JsonFlag, TraceFile, or_usage, show, write

app = typer.Typer(
    no_args_is_help=True,
    help=__doc__,
    epilog="Example: loraplex trace generate --adapters 500 --rate 40 -o trace.jsonl",
    rich_markup_mode=None,
)

Output = Annotated[Path | None, typer.Option("-o", help="File; standard output if none.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same bytes.")]
Kind = Annotated[Popularity, typer.Option(help="How the requests spread over the adapters.")]
Skew = Annotated[
    float | None,
    typer.Option("--zipf", "--skew", help="Zipf's s, geometric's ratio, functions' exponent."),
]


@app.command(epilog="Example: loraplex trace generate --adapters 500 --rate 40 -o trace.jsonl")
def generate(
    output: Output = None,
    seed: Seed = 1,
    arrivals: Annotated[int, typer.Option(help="Rows.")] = 1000,
    rate: Annotated[float, typer.Option(help="Mean arrivals a second.")] = 10,
    burstiness: Annotated[float, typer.Option(help="Spread of gaps over mean; 1: Poisson.")] = 1,
    diurnal: Annotated[float, typer.Option(help="Swing of the rate, 0 to below 1.")] = 0,
    period_s: Annotated[float, typer.Option(help="Of the swing.")] = 86_400,
    flash_at_s: Annotated[float, typer.Option(help="When a crowd comes.")] = 0,
    flash_s: Annotated[float, typer.Option(help="How long it stays; 0: none comes.")] = 0,
    flash_factor: Annotated[float, typer.Option(help="Rate in it over rate beside it.")] = 5,
    flash_adapter: Annotated[int | None, typer.Option(help="Whom it asks for, by number.")] = None,
    adapters: Annotated[int, typer.Option(help="Adapters to draw from.")] = 100,
    popularity: Kind = Popularity.ZIPF,
    zipf: Skew = None,
    drift_s: Annotated[float, typer.Option(help="Ranks move on this often; 0: never.")] = 0,
    base_share: Annotated[float, typer.Option(help="Part that asks for the base model.")] = 0,
    tenants: Annotated[int, typer.Option(help="Tenants that own the adapters.")] = 10,
    session_requests: Annotated[float, typer.Option(help="Mean requests of a session.")] = 1,
    think_s: Annotated[float, typer.Option(help="Mean time between those.")] = 30,
    prompt_tokens: Annotated[float, typer.Option(help="Mean prompt.")] = 128,
    prompt_tokens_max: Annotated[int, typer.Option(help="Longest prompt.")] = 2048,
    output_tokens: Annotated[float, typer.Option(help="Mean output.")] = 64,
    output_tokens_max: Annotated[int, typer.Option(help="Longest output.")] = 512,
) -> None:
    """Make a synthetic trace: popularity, bursts, days, crowds, drift, sessions."""
    recipe = or_usage(
        lambda: Recipe(
            seed=seed,
            arrivals=arrivals,
            rate_per_s=rate,
            burstiness=burstiness,
            tide=Tide(
                amplitude=diurnal,
                period_s=period_s,
                flash_at_s=flash_at_s,
                flash_s=flash_s,
                flash_factor=flash_factor,
            ),
            adapters=adapters,
            popularity=popularity,
            skew=zipf,
            drift_s=drift_s,
            crowd_adapter=flash_adapter,
            base_share=base_share,
            tenants=tenants,
            session_requests=session_requests,
            think_s=think_s,
            prompt_tokens_mean=prompt_tokens,
            prompt_tokens_max=prompt_tokens_max,
            output_tokens_mean=output_tokens,
            output_tokens_max=output_tokens_max,
        )
    )
    write(traces.encode(generate_trace(recipe)), output)


@app.command(
    epilog="Example: loraplex trace convert azure_llm_2023_conv.csv.gz --adapters 128 "
    "--duration-s 600 -o trace.jsonl"
)
def convert(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="CSV, JSON or JSON lines; .gz.")],
    output: Output = None,
    form: Annotated[
        str | None,
        typer.Option("--from", help="; ".join(f.name for f in FORMATS) + ". Found if not said."),
    ] = None,
    adapters: Annotated[int, typer.Option(help="Drawn where the source names none.")] = 100,
    tenants: Annotated[int, typer.Option(help="Likewise.")] = 10,
    popularity: Kind = Popularity.ZIPF,
    zipf: Skew = None,
    seed: Seed = 1,
    base: Annotated[str | None, typer.Option(help="This model is the base, no adapter.")] = None,
    start_s: Annotated[float, typer.Option(help="Where the slice begins.")] = 0,
    duration_s: Annotated[float | None, typer.Option(help="How long the slice is.")] = None,
    speed: Annotated[float, typer.Option(help="Times are divided by it.")] = 1,
    prompt_scale: Annotated[float, typer.Option(help="Prompt tokens are multiplied by it.")] = 1,
    output_scale: Annotated[float, typer.Option(help="Output tokens likewise.")] = 1,
    tokens_max: Annotated[int, typer.Option(help="Longest prompt and output.")] = 1 << 20,
) -> None:
    """Turn an Azure, Mooncake, ServeGen or Arena trace, a log or our ledger into a trace."""
    how = or_usage(
        lambda: Conversion(
            adapters=adapters,
            tenants=tenants,
            popularity=popularity,
            skew=zipf,
            seed=seed,
            base=base,
            start_s=start_s,
            duration_s=duration_s,
            speed=speed,
            prompt_scale=prompt_scale,
            output_scale=output_scale,
            tokens_max=tokens_max,
        )
    )
    write(traces.encode(or_usage(lambda: convert_trace(source, how, form=form))), output)


@app.command(epilog="Example: loraplex trace describe trace.jsonl --html trace.html")
def describe(
    trace: TraceFile,
    html: Annotated[Path | None, typer.Option(help="Write a page of charts there too.")] = None,
    json: JsonFlag = False,
) -> None:
    """Fit a trace: rate, burstiness, skew, working set, lengths."""
    rows = or_usage(lambda: traces.read(trace))
    told = or_usage(lambda: describe_trace(rows))
    if html is not None:
        write(portrait(rows, told, trace.name).encode(), html)
    facts = asdict(told)
    if json:  # JSON has no nan
        facts["dispersion"] = {
            width: value if math.isfinite(value) else None
            for width, value in told.dispersion.items()
        }
    show(facts, json)
