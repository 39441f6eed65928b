"""`python -m loadtests`: traces, the lessons, and a run of a trace through the cores."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.config import GatewayConfig
from gateway.core.breaker import HealthRules
from gateway.core.dispatcher import Dispatcher
from loadtests import lesson_commands, trace_commands
from loadtests import trace as traces
from loadtests.sim_replica import Prices
from loadtests.simulator import Run
from loadtests.simulator import simulate as simulate_trace
from loadtests.usage import JsonFlag, TraceFile, or_usage, show
from shared.settings import load

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
app.add_typer(trace_commands.app, name="trace")
app.add_typer(lesson_commands.app, name="lesson")


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
    json: JsonFlag = False,
) -> None:
    """Run a trace through the gateway's and the replica's cores under virtual time.

    Example: python -m loadtests simulate trace.jsonl --replicas 6 --slots 16 --host 128
    """
    settings = or_usage(lambda: load(GatewayConfig, config))
    prices = Prices(
        slots=slots,
        host_max=host,
        capacity=capacity,
        disk_load_s=disk_ms / 1e3,
        host_load_s=host_ms / 1e3,
        prefill_s=prefill_ms / 1e3,
        output_token_s=token_ms / 1e3,
    )
    rows = or_usage(lambda: traces.read(trace))
    run = or_usage(
        lambda: simulate_trace(
            rows, dispatcher=dispatcher_of(settings), replicas=replicas, prices=prices
        )
    )
    show(figures(run), json)


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


if __name__ == "__main__":
    app()
