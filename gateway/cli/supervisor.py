"""Runs a fleet on one machine: Valkey, replicas, gateway; ends it in the opposite order.

    starting    base -> Valkey -> replicas (side by side) -> gateway -> first tenants
    running     a part that dies is started again where it was, with growing pauses; one that dies
                five times in two minutes ends the fleet
    draining    gateway first (no new requests, streams finish), then replicas, then Valkey

The replicas' ring places hang on their names and their addresses are kept over a restart, so the
gateway needs to be told nothing when one comes back.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, Protocol

import yaml

from gateway.cli.client import Address
from gateway.cli.demo_model import prepare_base, seed_adapters
from gateway.cli.failure import Failure, one_failure
from gateway.cli.first_run import FirstRun
from gateway.cli.fleet import Fleet
from gateway.cli.fleet_store import OwnStore, reach
from gateway.cli.plan import Plan
from gateway.cli.process import Child, Died, how
from gateway.config import GatewayConfig, ReplicaEntry
from shared.clock import monotonic
from shared.tasks import spawn, stop

Say = Callable[[str], None]

_REPLICA_READY_S: Final = 300.0
_GATEWAY_READY_S: Final = 60.0
_DEATHS_MAX: Final = 5
_DEATHS_WINDOW_S: Final = 120.0
_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 8.0
_GRACE_S: Final = 5.0
"""On top of what a part allows itself for draining."""


class Part(Protocol):
    """What is kept alive: a `Child`, or the fleet's own store."""

    @property
    def name(self) -> str: ...

    async def exited(self) -> int: ...

    def tail(self) -> str: ...


class Supervisor:
    def __init__(self, plan: Plan, say: Say) -> None:
        self._plan = plan
        self._say = say
        self._held = ExitStack()  # the data directory's claim and Valkey
        self._replicas: list[Child] = []
        self._gateway: Child | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._broken: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()

    async def start(self) -> Fleet:
        """Everything up and answering. Raises Failure; then call `drain` all the same."""
        plan, home = self._plan, self._plan.home
        home.make()
        self._held.enter_context(home.claimed())
        base = plan.base or await prepare_base(home, self._say)
        adapters = plan.adapters or home.adapters(base.name)
        adapters.mkdir(parents=True, exist_ok=True)
        if plan.base is None and plan.adapters is None:
            seed_adapters(adapters)
        first_run = FirstRun(home, self._say)
        url = await self._start_store()
        entries = await self._start_replicas(
            ["--base", str(base), "--adapters", str(adapters), "--threads", str(plan.threads)]
        )
        config = _gateway_config(plan, entries, store_url=url, admin_key=first_run.admin_key())
        address = await self._start_gateway(config)
        admin = Address(_admin_url(config, address), config.admin.key)
        fleet = Fleet(
            url=address,
            admin_address=admin,
            tenants={},
            base=base.name,
            adapters=adapters,
            replicas=tuple(entry.id for entry in entries),
            home=home,
        )
        await fleet.wait_until_ready()  # a gateway that has not read its tenants knows none
        tenants = await asyncio.to_thread(first_run.tenants, address, admin)
        home.announce({"url": address, "admin_url": admin.url, "pid": os.getpid()})
        return replace(fleet, tenants=tenants)

    async def broken(self) -> Failure:
        """Waits until a part has died for good; for ever in a sound fleet."""
        return await asyncio.shield(self._broken)

    async def drain(self) -> None:
        """End everything that was started, in order; what runs may finish first."""
        await stop(*self._keepers)
        grace_s = self._plan.config.forward.drain_s + _GRACE_S
        if self._gateway is not None:
            self._say("draining the gateway")
            await self._gateway.stop(grace_s=grace_s)
        if self._replicas:
            self._say("draining the replicas")
            await asyncio.gather(*(child.stop(grace_s=grace_s) for child in self._replicas))
        self._held.close()

    def kill(self) -> None:
        """At once; streams are cut."""
        for child in (self._gateway, *self._replicas):
            if child is not None:
                child.kill()
        self._held.close()

    async def _start_store(self) -> str:
        if self._plan.external_store:
            await reach(self._plan.config.store)
            return self._plan.config.store.url
        self._say("starting Valkey")
        store = OwnStore(self._plan.home, self._held)

        async def start_again() -> None:
            await store.start_again()
            self._say("Valkey is ready again, with what it held")

        self._keep(store, start_again)
        return store.url

    async def _start_replicas(self, arguments: list[str]) -> list[ReplicaEntry]:
        names = [f"replica-{index}" for index in range(self._plan.replicas)]
        threads = str(self._plan.threads)
        tracing = (
            self._plan.config.tracing.model_dump()
        )  # one collector gets the spans of all parts
        environ = {f"LORAPLEX_TRACING__{key.upper()}": str(value) for key, value in tracing.items()}
        environ["OMP_NUM_THREADS"] = threads
        self._say(f"starting {', '.join(names)} (threads of each: {threads})")
        for name in names:
            log = self._plan.home.logs / f"{name}.log"
            self._replicas.append(Child(name=name, log=log, environ=environ))
        urls = await _all(
            self._start_replica(child, arguments, port="0") for child in self._replicas
        )
        for child, url in zip(self._replicas, urls, strict=True):
            port = url.rsplit(":", 1)[1].rstrip("/")
            self._keep(child, _restart(self._start_replica, child, arguments, port))
        return [ReplicaEntry(id=n, url=url) for n, url in zip(names, urls, strict=True)]

    async def _start_replica(self, child: Child, arguments: list[str], port: str) -> str:
        command = ["replica", *arguments, "--name", child.name, "--port", port]
        url = await child.start(command, timeout_s=_REPLICA_READY_S)
        self._say(f"{child.name} is ready on {url}")
        return url

    async def _start_gateway(self, config: GatewayConfig) -> str:
        self._say("starting the gateway")
        home = self._plan.home
        path = home.gateway_config
        path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        path.chmod(0o600)  # it holds the admin key
        child = self._gateway = Child(name="gateway", log=home.logs / "gateway.log", environ={})
        command = ["gateway", "--config", str(path)]
        url = await child.start(command, timeout_s=_GATEWAY_READY_S)
        again = [*command, "--port", url.rsplit(":", 1)[1].rstrip("/")]
        self._keep(child, lambda: child.start(again, timeout_s=_GATEWAY_READY_S))
        return url

    def _keep(self, part: Part, start_again: Callable[[], Awaitable[object]]) -> None:
        self._keepers.append(spawn(self._keeper(part, start_again), name=f"keep {part.name}"))

    async def _keeper(self, part: Part, start_again: Callable[[], Awaitable[object]]) -> None:
        deaths: deque[float] = deque(maxlen=_DEATHS_MAX)
        while True:
            code = await part.exited()
            deaths.append(monotonic())
            recent = [at for at in deaths if deaths[-1] - at < _DEATHS_WINDOW_S]
            if len(recent) == _DEATHS_MAX:
                why = f"{part.name} died {_DEATHS_MAX} times in a row; giving up."
                if not self._broken.done():
                    self._broken.set_result(Failure(f"{why}\n{part.tail()}"))
                return
            pause_s = min(_PAUSE_MAX_S, _PAUSE_S * 2 ** (len(recent) - 1))
            self._say(f"{part.name} {how(code)}; starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            try:
                await start_again()
            except Died:
                continue  # it has ended again, and counts again


def _restart(
    start: Callable[[Child, list[str], str], Awaitable[str]],
    child: Child,
    arguments: list[str],
    port: str,
) -> Callable[[], Awaitable[str]]:
    return lambda: start(child, arguments, port)


async def _all(starts: Iterable[Coroutine[Any, Any, str]]) -> list[str]:
    """Like gather, but nothing is left running when one fails."""
    with one_failure():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start) for start in starts]
    return [task.result() for task in tasks]


def _admin_url(config: GatewayConfig, address: str) -> str:
    port = config.admin.port
    return address if port is None else f"http://{config.admin.host}:{port}"


def _gateway_config(
    plan: Plan, replicas: list[ReplicaEntry], *, store_url: str, admin_key: str
) -> GatewayConfig:
    """The user's file, with what only the supervisor knows laid over it."""
    given = plan.config
    store = {"url": store_url, "spool": str(plan.spool)}
    return GatewayConfig.model_validate(
        given.model_dump()
        | {
            "fleet": given.fleet.model_dump() | {"replicas": [r.model_dump() for r in replicas]},
            "store": given.store.model_dump() | store,
            "admin": given.admin.model_dump() | {"key": given.admin.key or admin_key},
        }
    )
