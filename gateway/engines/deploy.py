"""Desired adapters, kept on every server that takes loads: what the registry has a path for.

Load before routing: an adapter is routable where the server lists it, and nowhere before. A new
version is loaded beside the old one, and the old one unloaded when the new one is there and nothing
of ours runs with the adapter. What was removed from the registry is unloaded likewise. A server
that was away, or that lists an adapter no more, is given it again. While the registry has not been
read nothing is done: an empty wish is not the wish for nothing.

Of several gateways one at a time acts on a server (`Turn`); the others look on, and see in the
server's list what it has done. One that was refused lets the next one try, so that each has the
server's reason to show.

With several bases in the fleet nobody can tell from a record which base it fits, and not every
server checks: then, and while the base of a replica is not known yet, only what a replica's
`deploy` names is given to it. What it holds already stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from gateway.core.deployment import Deployment, Step
from gateway.edge.exchange import UpstreamError
from gateway.engines.engine import name_here, name_there
from gateway.state.adapter_records import AdapterRecord, AdapterVersion
from shared import tasks
from shared.clock import Clock, monotonic
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, Tier

_log = logging.getLogger(__name__)

LOOK_S: Final = 1.0


class Place(Protocol):
    """A server that takes loads."""

    @property
    def replica(self) -> ReplicaId: ...

    @property
    def failures(self) -> dict[AdapterId, AdapterState]:
        """Written here: the version it was refused, FAILED, and why."""
        ...

    @property
    def held(self) -> frozenset[str] | None:
        """What it lists, as `name_there` writes it; None while it is lost."""
        ...

    async def load(self, name: str, path: str) -> str:
        """Why it did not; "" when it says that it did. Raises UpstreamError."""
        ...

    async def unload(self, name: str) -> str: ...


class Turn(Protocol):
    """Whether this gateway may act on the place now."""

    async def mine(self) -> bool: ...

    def let_go(self) -> None: ...


class Desired(Protocol):
    @property
    def loaded(self) -> bool: ...

    def adapter(self, name: str) -> AdapterRecord | None: ...

    def desired(self) -> Iterable[AdapterRecord]: ...


class Deployer:
    """For one place; `run` until cancelled."""

    def __init__(
        self,
        place: Place,
        registry: Desired,
        *,
        takes: Callable[[], Callable[[str], bool]],
        in_use: Callable[[ReplicaId, AdapterId], int],
        turn: Turn | None = None,
        deployment: Deployment | None = None,
        look_s: float = LOOK_S,
        clock: Clock = monotonic,
    ) -> None:
        """`takes`: says now whether an adapter belongs there; `in_use`: our requests that run."""
        self._place = place
        self._registry = registry
        self._takes = takes
        self._in_use = in_use
        self._turn = turn
        self._deployment = deployment or Deployment()
        self._look_s = look_s
        self._clock = clock
        self._calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            while True:
                await self._look()
                await asyncio.sleep(self._look_s)
        finally:
            await tasks.stop(*self._calls)
            if self._turn is not None:
                self._turn.let_go()

    async def _look(self) -> None:
        held = self._place.held
        if held is None:
            self._deployment.restarted()
            self._place.failures.clear()
            return
        if not self._registry.loaded:
            return
        wanted = self._wanted()
        leaving = [name for name in held if name not in wanted and self._may_go(name, held)]
        busy = bool(self._calls or leaving or wanted.keys() - held)
        if busy and self._turn is not None and not await self._turn.mine():
            return
        for step in self._deployment.due(wanted, leaving, held, self._clock()):
            path = wanted[step.name].path if step.load else ""
            call = tasks.spawn(self._call(step, path), name=f"deploy {step.name}")
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        if self._turn is not None and not self._calls:
            self._turn.let_go()
        self._place.failures.clear()
        for name, why in self._deployment.refused().items():
            adapter = AdapterId(name_here(name)[0])
            self._place.failures[adapter] = AdapterState(
                adapter, wanted[name].digest, Tier.DISK, AdapterStatus.FAILED, reason=why
            )

    def _wanted(self) -> dict[str, AdapterVersion]:
        """By their names there."""
        found, belongs = {}, self._takes()
        for record in self._registry.desired():
            now = record.held(record.current)
            if now is not None and belongs(record.name):
                found[name_there(record.name, now.digest)] = now
        return found

    def _may_go(self, name: str, held: frozenset[str]) -> bool:
        """It is ours, nothing of ours runs with it, and it is not wanted or has its successor."""
        adapter, digest = name_here(name)
        if not digest or self._in_use(self._place.replica, AdapterId(adapter)):
            return False
        record = self._registry.adapter(adapter)
        if record is None or not record.path:
            return True
        current = name_there(adapter, record.current)
        return name != current and current in held

    async def _call(self, step: Step, path: str) -> None:
        place, why = self._place, "the call was given up"
        try:
            why = await (place.load(step.name, path) if step.load else place.unload(step.name))
        except UpstreamError as error:
            why = str(error)
        finally:
            self._deployment.ended(step, why, self._clock())
            told = {"replica": place.replica, "adapter": step.name, "why": why}
            what = "load" if step.load else "unload"
            if why:
                _log.warning("%s refused", what, extra=told)
            else:
                _log.info("%s done", what, extra=told)
