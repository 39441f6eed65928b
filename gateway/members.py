"""The members of the fleet, and what goes with each: connections, its watch, its deployer.

Sources tell who is there (the file, DNS, those that joined), the census decides, and here it is
done: one task, so that a change is whole before the next begins. A replica joins the ring with its
first report, and placement warms it before traffic moves (gateway/core/placement.py).

Law: whoever was given a place before a replica left, or moved, still finds connections to it; they
are closed once nothing runs on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gateway.completion.forward import Timeouts
from gateway.config import GatewayConfig, ReplicaEntry
from gateway.core.census import Census, Join, Leave, Move
from gateway.discovery.joining import Joining
from gateway.edge.upstream import Upstream
from gateway.engines import ENGINES
from gateway.engines.deploy import Deployer, Place
from gateway.engines.deploy_native import NativePlace
from gateway.engines.polled import Polled
from gateway.fleet.pump import Pump
from gateway.fleet.watch import Watch
from gateway.metrics import Metrics
from gateway.parts import entries_of, timeouts_of, upstream_of
from gateway.state.registry import Registry
from gateway.state.turns import Turn
from gateway.store.redis import Store
from shared import tasks
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState

_log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Who is silent, and who is gone, is looked at this often."""

FILE: Final = "file"
JOINED: Final = "join"

Entries = Mapping[ReplicaId, ReplicaEntry]


@dataclass(frozen=True, slots=True)
class Links:
    """How each member is reached; written by Members alone."""

    upstreams: dict[ReplicaId, Upstream] = field(default_factory=dict)
    natives: dict[ReplicaId, Upstream] = field(default_factory=dict)  # our own replicas'
    dialects: dict[ReplicaId, Polled] = field(default_factory=dict)  # the others'
    timeouts: dict[ReplicaId, Timeouts] = field(default_factory=dict)

    def drop(self, replica: ReplicaId) -> None:
        self.upstreams.pop(replica, None)
        self.natives.pop(replica, None)
        self.dialects.pop(replica, None)
        self.timeouts.pop(replica, None)


class Members:
    def __init__(
        self,
        config: GatewayConfig,
        links: Links,
        *,
        pump: Pump,
        registry: Registry,
        store: Store,
        metrics: Metrics,
    ) -> None:
        """Raises BadSettings."""
        self._config = config
        self._links = links
        self._pump = pump
        self._registry = registry
        self._store = store
        self._metrics = metrics
        self._listed = entries_of(config)
        self._services = {f"dns {one.srv}": one for one in config.discovery.services}
        self._census: Census[ReplicaEntry] = Census(
            order=(FILE, *self._services, JOINED),
            members_max=config.discovery.members_max,
            forget_s=config.discovery.forget_s,
        )
        self.joining: Final = Joining(store, config.discovery, told=partial(self._told, JOINED))
        self._at_work: dict[ReplicaId, list[asyncio.Task[None]]] = {}
        self._places: dict[ReplicaId, Place] = {}
        self._retired: list[tuple[ReplicaId, Upstream]] = []
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """The replicas of the file are followed when it returns; the others as they are found."""
        self._census.told(FILE, self._listed)
        await self._settle()
        for source, service in self._services.items():
            # it takes a while to import, and most gateways do not need it
            from gateway.discovery.service import ServiceLookup

            told = partial(self._told, source)
            lookup = ServiceLookup(
                service, self._config.discovery, told=told, metrics=self._metrics
            )
            self._tasks.append(tasks.spawn(lookup.run(), name=source))
        if self._config.fleet.token:
            self._tasks.append(tasks.spawn(self.joining.run(), name="joined replicas"))
        self._tasks.append(tasks.spawn(self._run(), name="members"))

    async def close(self) -> None:
        await tasks.stop(*self._tasks)
        await tasks.stop(*[task for mine in self._at_work.values() for task in mine])
        for upstream in [*self._links.upstreams.values(), *[one for _, one in self._retired]]:
            upstream.close()

    # -- questions

    def found_by(self, replica: ReplicaId) -> str:
        """Which source counts for it: file, dns NAME or join; "" when none names it any more."""
        return self._census.holder(replica) or ""

    @property
    def crowded(self) -> int:
        """Replicas that are there and not taken in, for `members_max`."""
        return len(self._census.crowded)

    def refused(self, replica: ReplicaId) -> Mapping[AdapterId, AdapterState]:
        """Versions that it would not load, with its words."""
        place = self._places.get(replica)
        return {} if place is None else place.failures

    # -- inside

    def _told(self, source: str, entries: Entries) -> None:
        self._census.told(source, entries)
        self._news.set()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            self._close_retired()
            await self._settle()

    async def _settle(self) -> None:
        crowded = set(self._census.crowded)
        for change in self._census.settle(self._pump.dispatcher.life, self._pump.clock()):
            match change:
                case Join(replica, entry):
                    self._take_in(replica, entry)
                    self._pump.replica_added(replica)
                    self._note("joined", replica, entry.url)
                case Move(replica, entry):
                    await self._let_go(replica)
                    self._take_in(replica, entry)
                    self._note("moved", replica, entry.url)
                case Leave(replica):
                    self._pump.replica_removed(replica)
                    await self._let_go(replica)
                    self._note("left", replica, "")
        for replica in sorted(self._census.crowded - crowded):
            told = {"replica": replica, "members_max": self._config.discovery.members_max}
            _log.error("replica not taken in: raise discovery.members_max", extra=told)

    def _note(self, change: str, replica: ReplicaId, url: str) -> None:
        self._metrics.members.labels(change).inc()
        told = {"replica": replica, "url": url, "found_by": self.found_by(replica)}
        _log.info("replica %s", change, extra=told)

    def _take_in(self, replica: ReplicaId, entry: ReplicaEntry) -> None:
        config, links = self._config, self._links
        upstream = upstream_of(entry, connect_timeout_s=config.forward.connect_timeout_s)
        links.drop(replica)  # of one that left, and whose last requests still ran
        links.upstreams[replica] = upstream
        links.timeouts[replica] = timeouts_of(entry, config.forward)
        takes = partial(self._takes, entry)
        if entry.kind == "native":
            links.natives[replica] = upstream
            follow = self._watch(replica, upstream).run()
            place: Place | None = self._native(replica, upstream)
        else:
            polled = links.dialects[replica] = self._polled(entry, upstream, takes)
            follow = polled.run()
            place = polled if polled.engine.takes_loads else None
        work = [tasks.spawn(follow, name=f"watch {replica}")]
        if place is not None:
            self._places[replica] = place
            in_use = self._pump.dispatcher.in_use
            turn = Turn(self._store, f"deploy:{replica}")
            deployer = Deployer(place, self._registry, takes=takes, in_use=in_use, turn=turn)
            work.append(tasks.spawn(deployer.run(), name=f"deploy {replica}"))
        self._at_work[replica] = work

    async def _let_go(self, replica: ReplicaId) -> None:
        """Nothing new; requests that have a place there keep their connections."""
        self._places.pop(replica, None)
        self._retired.append((replica, self._links.upstreams[replica]))
        await tasks.stop(*self._at_work.pop(replica))

    def _close_retired(self) -> None:
        """Called a turn after `_let_go` at least: who had a place has begun by then."""
        upstreams = self._links.upstreams
        for replica, upstream in [one for one in self._retired if not one[1].busy]:
            self._retired.remove((replica, upstream))
            upstream.close()
            if upstreams.get(replica) is upstream:
                self._links.drop(replica)

    def _watch(self, replica: ReplicaId, upstream: Upstream) -> Watch:
        fleet = self._config.fleet
        return Watch(
            replica,
            upstream,
            self._pump,
            token=fleet.token,
            silence_heartbeats=fleet.silence_heartbeats,
            metrics=self._metrics,
            probe_s=fleet.probe_s,
        )

    def _native(self, replica: ReplicaId, upstream: Upstream) -> Place:
        return NativePlace(
            replica,
            upstream,
            self._pump.dispatcher,
            self._registry.desired,
            token=self._config.fleet.token,
        )

    def _polled(
        self, entry: ReplicaEntry, upstream: Upstream, takes: Callable[[], Callable[[str], bool]]
    ) -> Polled:
        return Polled(
            entry,
            ENGINES[entry.kind](),
            upstream,
            self._pump,
            self._registry,
            silence_heartbeats=self._config.fleet.silence_heartbeats,
            takes=takes,
        )

    def _takes(self, entry: ReplicaEntry) -> Callable[[str], bool]:
        return entry.takes(len(self._bases()))

    def _bases(self) -> set[str]:
        """What the replicas serve between them. One of the file that nobody knows yet is another;
        one that was found and has not spoken is none yet, or each that joins would stop loads."""
        base_of = self._pump.dispatcher.base_of
        known = {
            replica: entry.base or base_of(replica)
            for replica, entry in self._census.members.items()
        }
        return {base for replica, base in known.items() if base or replica in self._listed}
