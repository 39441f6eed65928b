"""`python -m gateway --config FILE`: arguments, configuration, and then the app."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from gateway import app as gateway_app
from gateway.config import GatewayConfig
from shared import logs, settings

cli = typer.Typer(add_completion=False, rich_markup_mode=None)


@cli.command(
    help="The gateway: one OpenAI-compatible endpoint for all tenants, over a fleet of replicas.",
    epilog="Example: python -m gateway --example-config > gateway.yaml; "
    "python -m gateway --config gateway.yaml --port 8080",
)
def main(
    config: Annotated[
        Path | None, typer.Option(help="YAML file; defaults where it says nothing.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Tenants' port, over the file's; 0 takes a free one.")
    ] = None,
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
    try:
        loaded = settings.load(GatewayConfig, config)
        if port is not None:
            listen = loaded.listen.model_dump() | {"port": port}
            loaded = settings.parse(
                GatewayConfig, loaded.model_dump() | {"listen": listen}, origin="--port"
            )
        gateway_app.upstreams(loaded)
    except settings.BadSettings as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    if check_config:
        print("the configuration is right")
        return
    logs.configure(level=loaded.log_level)
    try:
        uvloop.run(gateway_app.run(loaded))
    except OSError as error:
        print(f"cannot listen: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    cli()
