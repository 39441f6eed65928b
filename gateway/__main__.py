"""`python -m gateway --config FILE`: arguments, configuration, and then the app."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from gateway import app as gateway_app
from gateway import parts
from gateway import workers as gateway_workers
from gateway.config import GatewayConfig
from shared import logs, settings
from shared.tracing import require_exporter

cli = typer.Typer(add_completion=False, rich_markup_mode=None)


@cli.command(
    help="The gateway: one OpenAI-compatible endpoint for all tenants, over a fleet of replicas.",
    epilog="Example: python -m gateway --example-config > gateway.yaml; "
    "python -m gateway --config gateway.yaml --port 8080 --workers 4",
)
def main(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; defaults where it says nothing.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Tenants' port, over the file's; 0 takes a free one.")
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=gateway_workers.WORKERS_MAX,
            help="Processes that share the port, for as many cores; worker i has admin port + i.",
        ),
    ] = 1,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Say whether the file is right, and stop.")
    ] = False,
    example_config: Annotated[
        bool, typer.Option("--example-config", help="Print a commented example, and stop.")
    ] = False,
) -> None:
    if example_config:
        print(settings.example(GatewayConfig), end="")
        return
    if worker:
        given = gateway_workers.read_config()
        _serve(gateway_app.run(given, until=gateway_workers.supervisor_gone), given)
        return
    loaded = _loaded(config, port)
    if check_config:
        print("the configuration is right")
    elif workers == 1:
        _serve(gateway_app.run(loaded), loaded)
    else:
        _serve(gateway_workers.run(loaded, workers), loaded)


def _loaded(config: Path | None, port: int | None) -> GatewayConfig:
    try:
        loaded = settings.load(GatewayConfig, config)
        if port is not None:
            listen = loaded.listen.model_dump() | {"port": port}
            loaded = settings.parse(
                GatewayConfig, loaded.model_dump() | {"listen": listen}, origin="--port"
            )
        parts.entries_of(loaded)
        require_exporter(loaded.tracing)
    except settings.BadSettings as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    return loaded


def _serve(work: Coroutine[Any, Any, None], config: GatewayConfig) -> None:
    logs.configure(level=config.log_level)
    try:
        uvloop.run(work)
    except OSError as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except gateway_workers.WorkerFailed as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    cli()
