"""`python -m replica`: one replica on one port, until SIGTERM.

Standard output gets one line, when the replica serves; the log is JSON on standard error. The first
SIGTERM or SIGINT drains, the second ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
import uvloop

from replica.config import ReplicaConfig
from shared import logs, settings
from shared.tracing import require_exporter

if TYPE_CHECKING:
    from replica.app import Replica

_SPINS: Final = "20000"
"""Some 0.5 ms, longer than what lies between two parts of a pass. Then a thread sleeps."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_EXAMPLE = "python -m replica --base ./base --adapters ./adapters --name replica-0 --port 8001"


@app.command(epilog=f"Example: {_EXAMPLE}")
def main(
    config: Annotated[Path | None, typer.Option(help="YAML file; flags override it.")] = None,
    base: Annotated[Path | None, typer.Option(help="Folder of the base model.")] = None,
    adapters: Annotated[Path | None, typer.Option(help="Root of the adapter store.")] = None,
    name: Annotated[str | None, typer.Option(help="Stable name of this replica.")] = None,
    served_name: Annotated[
        str | None, typer.Option(help="The base's name in `model`; default: its folder's name.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    max_loras: Annotated[int | None, typer.Option(help="Slots: adapters in one pass.")] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="Highest rank served.")] = None,
    max_cpu_loras: Annotated[int | None, typer.Option(help="Adapters in host memory.")] = None,
    host_bytes: Annotated[int | None, typer.Option(help="Bytes of host memory for them.")] = None,
    adapter_store: Annotated[
        str | None, typer.Option(help="URL of an object store; --adapters is its disk cache.")
    ] = None,
    disk_cache_bytes: Annotated[int | None, typer.Option(help="Bytes of that cache.")] = None,
    merged: Annotated[
        str | None, typer.Option(help="Adapter to fold into the base; then only it is served.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Linear weights of the base: none or fp8.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 0: all cores.")] = None,
    spin: Annotated[bool | None, typer.Option("--spin", help="They spin: own cores.")] = None,
    device: Annotated[str | None, typer.Option(help="Torch device: cpu, cuda:0, …")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output together.")
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="Admin address of a gateway whose fleet it joins.")
    ] = None,
    join_url: Annotated[
        str | None, typer.Option(help="Address at which gateways reach it, if not as it listens.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING, ERROR.")] = None,
    example_config: Annotated[
        bool, typer.Option("--example-config", help="Print a commented YAML and exit.")
    ] = False,
) -> None:
    """Serve a base model and its LoRA adapters over OpenAI's HTTP."""
    given = {k: v for k, v in locals().items() if v is not None and k in ReplicaConfig.model_fields}
    if example_config:
        sys.stdout.write(settings.example(ReplicaConfig))
        return
    try:
        replica = _make(config, given)
    except settings.BadSettings as error:
        _give_up(str(error), 2)
    uvloop.run(_serve(replica))
    logging.shutdown()
    # Nothing is left to do, but a thread may still wait for a store that does not answer.
    os._exit(0)


def _make(path: Path | None, flags: dict[str, Any]) -> Replica:
    config = settings.load(ReplicaConfig, path, flags=flags)
    require_exporter(config.tracing)  # before what takes seconds
    logs.configure(level=config.log_level, replica=config.name)
    if config.spin:
        os.environ["GOMP_SPINCOUNT"] = _SPINS  # read when torch is loaded, before OMP_WAIT_POLICY
    # These take seconds, which help and bad settings need not.
    from replica.app import Replica
    from replica.engine.model_config import BadBase

    try:
        return Replica(config)
    except BadBase as error:
        _give_up(str(error), 1)


def _give_up(why: str, code: int) -> NoReturn:
    sys.stderr.write(f"replica: {why}\n")
    raise typer.Exit(code)


async def _serve(replica: Replica) -> None:
    ending, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if ending.is_set() else ending).set()

    loop = asyncio.get_running_loop()
    for kind in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(kind, signalled)
    url = await replica.start()
    sys.stdout.write(f"loraplex replica {replica.config.name} ready on {url}\n")
    sys.stdout.flush()
    await ending.wait()
    await replica.stop(hurry=hurry)


if __name__ == "__main__":
    app(prog_name="python -m replica")
