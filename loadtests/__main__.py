"""`python -m loadtests`: make a trace, describe one, or run one through the cores."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import orjson
import typer

from gateway.config import GatewayConfig
from gateway.core.breaker import HealthRules
from gateway.core.dispatcher import Dispatcher
from loadtests import trace as traces
from loadtests.description import describe as describe_trace
from loadtests.recipe import Recipe
from loadtests.recipe import generate as generate_trace
from loadtests.sim_replica import Prices
from loadtests.simulator import Run
from loadtests.simulator import simulate as simulate_trace
from shared.settings import load

T = TypeVar("T")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="JSON lines of arrivals.")]


@app.command()
def generate(
    output: Annotated[
        Path | None, typer.Option("-o", help="File; standard output if none.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 1,
    arrivals: Annotated[int, typer.Option(help="Rows.")] = 1000,
    rate: Annotated[float, typer.Option(help="Mean arrivals a second (Poisson).")] = 10,
    adapters: Annotated[int, typer.Option(help="Adapters to draw from.")] = 100,
    zipf: Annotated[float, typer.Option(help="Skew s: 0 is uniform.")] = 1.1,
    base_share: Annotated[float, typer.Option(help="Part that asks for the base model.")] = 0,
    tenants: Annotated[int, typer.Option(help="Tenants that own the adapters.")] = 10,
    prompt_tokens: Annotated[float, typer.Option(help="Mean prompt, in tokens.")] = 128,
    output_tokens: Annotated[float, typer.Option(help="Mean output, in tokens.")] = 64,
) -> None:
    """Make a synthetic trace.

    Example: python -m loadtests generate --adapters 500 --rate 40 --arrivals 20000 -o trace.jsonl
    """
    try:
        recipe = Recipe(
            seed=seed,
            arrivals=arrivals,
            rate_per_s=rate,
            adapters=adapters,
            skew=zipf,
            base_share=base_share,
            tenants=tenants,
            prompt_tokens_mean=prompt_tokens,
            output_tokens_mean=output_tokens,
        )
    except ValueError as error:
        _usage(str(error))
    data = traces.encode(generate_trace(recipe))
    if output is None:
        sys.stdout.buffer.write(data)
    else:
        output.write_bytes(data)


@app.command()
def describe(trace: TraceFile, json: Json = False) -> None:
    """Say what a trace is like: counts, rate, skew, working set.

    Example: python -m loadtests describe trace.jsonl
    """
    told = _or_usage(lambda: describe_trace(traces.read(trace)))
    _print(asdict(told), json)


@app.command()
def simulate(
    trace: TraceFile,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 3,
    slots: Annotated[int, typer.Option(min=1, help="Slots a replica has.")] = 16,
    host: Annotated[int, typer.Option(min=1, help="Adapters a replica keeps in memory.")] = 128,
    capacity: Annotated[int, typer.Option(min=1, help="Sequences a replica runs at once.")] = 32,
    disk_ms: Annotated[float, typer.Option(min=0, help="Disk to host memory.")] = 150,
    host_ms: Annotated[float, typer.Option(min=0, help="Host memory to a slot.")] = 4,
    prefill_ms: Annotated[float, typer.Option(min=0, help="First token, all else ready.")] = 20,
    token_ms: Annotated[float, typer.Option(min=0, help="Every further token.")] = 20,
    config: Annotated[
        Path | None, typer.Option(help="A gateway's file: its router and queue settings.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a trace through the gateway's and the replica's cores under virtual time.

    Example: python -m loadtests simulate trace.jsonl --replicas 6 --slots 16 --host 128
    """
    settings = _or_usage(lambda: load(GatewayConfig, config))
    prices = Prices(
        slots=slots,
        host_max=host,
        capacity=capacity,
        disk_load_s=disk_ms / 1e3,
        host_load_s=host_ms / 1e3,
        prefill_s=prefill_ms / 1e3,
        output_token_s=token_ms / 1e3,
    )
    rows = _or_usage(lambda: traces.read(trace))
    run = _or_usage(
        lambda: simulate_trace(
            rows, dispatcher=dispatcher_of(settings), replicas=replicas, prices=prices
        )
    )
    _print(figures(run), json)


def dispatcher_of(settings: GatewayConfig) -> Dispatcher:
    """As the live gateway makes it."""
    return Dispatcher(
        **settings.router.model_dump(),
        **settings.queue.model_dump(),
        silence_heartbeats=settings.fleet.silence_heartbeats,
        health=HealthRules(**settings.health.model_dump()),
    )


def figures(run: Run) -> dict[str, Any]:
    """What people compare runs by. `adapter_found_in`: where it was when its request came."""
    first = run.first_token_s()
    return {
        "arrived": len(run.outcomes),
        "finished": len(run.finished),
        "refused": dict(sorted(run.refused.items())),
        "virtual_s": run.ended_at_s,
        "ttft_p50_ms": first.p50 * 1e3,
        "ttft_p99_ms": first.p99 * 1e3,
        "adapter_found_in": {str(tier): share for tier, share in run.tier_shares().items()},
        "placed": dict(sorted(run.kinds().items())),
        "loads_from": {str(tier): count for tier, count in sorted(run.loads.items())},
        "replicas": {str(name): asdict(load) for name, load in run.replicas.items()},
    }


def _print(values: dict[str, Any], json: bool) -> None:
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


def _or_usage(work: Callable[[], T]) -> T:
    try:
        return work()
    except ValueError as error:
        _usage(str(error))


def _usage(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
