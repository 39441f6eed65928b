"""`loraplex up`: a gateway, replicas and their store on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gateway.cli.failure import INTERRUPTED
from gateway.cli.fleet import Fleet
from gateway.cli.home import Home
from gateway.cli.output import note
from gateway.cli.plan import DEMO_BASE, Plan, plan
from gateway.cli.supervisor import Supervisor
from shared.data_dir import default_data_dir
from shared.tasks import stop

Work = Callable[[Fleet], Awaitable[int]]
"""What to do with a fleet that is ready; the exit code when it returns before a signal."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

ReplicasOption = Annotated[int, typer.Option(metavar="N", help="Replicas to run.")]
BaseOption = Annotated[
    str, typer.Option(metavar="PATH", help="Model folder, or `demo` for SmolLM2-135M-Instruct.")
]
AdaptersOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of PEFT folders. Default: one in the data folder."),
]
PortOption = Annotated[
    int | None, typer.Option(metavar="P", min=0, max=65535, help="Default 8080; 0 takes any.")
]
DataDirOption = Annotated[
    Path | None,
    typer.Option(metavar="D", help="Default: $LORAPLEX_DATA or ~/.local/share/loraplex."),
]
ConfigOption = Annotated[
    Path | None, typer.Option(metavar="F", help="Gateway settings to start from (YAML).")
]


def up(
    replicas: ReplicasOption = 2,
    base: BaseOption = DEMO_BASE,
    adapters: AdaptersOption = None,
    port: PortOption = None,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
) -> None:
    """Run a whole fleet on this machine.

    Gateway, replicas and their store, until Ctrl-C, which drains and ends them. With a --config
    whose store.url is not the default, that store is used and none is started.
    """
    asked = plan(
        home=home(data_dir),
        replicas=replicas,
        base=base,
        adapters=adapters,
        port=port,
        config=config,
    )
    raise typer.Exit(asyncio.run(supervise(asked, _until_stopped)))


def home(data_dir: Path | None) -> Home:
    return Home((data_dir or default_data_dir()).expanduser().resolve())


async def _until_stopped(fleet: Fleet) -> int:
    print(await asyncio.to_thread(fleet.card), flush=True)
    await asyncio.Event().wait()
    return 0


async def supervise(asked: Plan, work: Work) -> int:
    """Start the fleet, do `work` with it, drain it; the exit code.

    The first SIGINT or SIGTERM drains, the second ends at once. A part that dies for good, or a
    start that fails, is a Failure, raised after the rest was ended.
    """
    supervisor = Supervisor(asked, note)
    asked_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, asked_to_stop.set)
    ready = asyncio.Event()
    try:
        return await _first_of(supervisor, ready, work, asked_to_stop)
    finally:
        for number in _SIGNALS:
            loop.add_signal_handler(number, _end_at_once, supervisor)
        await supervisor.drain()


async def _first_of(
    supervisor: Supervisor, ready: asyncio.Event, work: Work, asked_to_stop: asyncio.Event
) -> int:
    async def life() -> int:
        fleet = await supervisor.start()
        ready.set()
        return await work(fleet)

    async def signalled() -> int:
        await asked_to_stop.wait()
        note("draining; once more ends at once" if ready.is_set() else "stopping")
        return 0 if ready.is_set() else INTERRUPTED

    async def broken() -> int:
        raise await supervisor.broken()

    return await _race(life(), signalled(), broken())


async def _race(*contenders: Coroutine[Any, Any, int]) -> int:
    """The result, or the exception, of whichever ends first; the others are cancelled."""
    # not `spawn`: what they raise is the result, not a crash to report
    tasks = [asyncio.ensure_future(contender) for contender in contenders]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        await stop(*tasks)


def _end_at_once(supervisor: Supervisor) -> None:
    supervisor.kill()
    note("ended at once")
    raise SystemExit(INTERRUPTED)
