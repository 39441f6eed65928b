"""Where the gateway's objects meet, start in order, and stop in order.

Stopping: readiness falls at once and nothing new is taken (503); running streams get `drain_s`;
then, or at a second signal, what still runs is ended with an error its client can read. The
ledger is flushed last, so that no finished request goes unbilled.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Final

from aiohttp import web

from gateway.admin import AdminServices, add_admin_routes
from gateway.config import GatewayConfig
from gateway.core.dispatcher import Dispatcher, ReplicaState
from gateway.forward import Forwarder
from gateway.handlers import Handlers
from gateway.ledger import Ledger
from gateway.listener import Listener
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.probes import Probes
from gateway.pump import Pump
from gateway.quota import Quota
from gateway.registry import Registry
from gateway.store.redis import Store
from gateway.upstream import Upstream
from gateway.watch import Watch
from shared import tasks
from shared.ids import ReplicaId
from shared.settings import BadSettings

_END_S: Final = 2.0  # ended requests need one turn of the loop; this is for a loaded one


class Gateway:
    def __init__(self, config: GatewayConfig) -> None:
        """Raises BadSettings; touches nothing outside."""
        self._config = config
        self.metrics = Metrics()
        self.store = Store(
            config.store.url, prefix=config.store.prefix, timeout_s=config.store.timeout_s
        )
        self.registry = Registry(self.store)
        self.quota = Quota(self.store, config.quota)
        self.ledger = Ledger(self.store, config.store.spool)
        self.pump = Pump(_dispatcher(config), observe=self.metrics.decision)
        self._upstreams = upstreams(config)
        self._handlers = Handlers(
            config=config,
            registry=self.registry,
            quota=self.quota,
            ledger=self.ledger,
            pump=self.pump,
            forwarder=Forwarder(
                self._upstreams,
                config=config.forward,
                token=config.fleet.token,
                metrics=self.metrics,
            ),
            metrics=self.metrics,
        )
        self._listeners = self._make_listeners()
        self._watches: list[asyncio.Task[None]] = []
        self._gauges()

    @property
    def url(self) -> str:
        """Of the tenants' port, once started."""
        return self._listeners[0].url

    @property
    def admin_url(self) -> str:
        return self._listeners[-1].url

    async def start(self) -> None:
        """Listening when it returns; a store or replicas that are away do not stop it.

        Raises OSError when a port cannot be had.
        """
        await self.store.start()
        await self.registry.start()
        await self.ledger.start()
        for replica, upstream in self._upstreams.items():
            self.pump.replica_added(replica)
            watch = Watch(
                replica,
                upstream,
                self.pump,
                token=self._config.fleet.token,
                silence_heartbeats=self._config.fleet.silence_heartbeats,
                metrics=self.metrics,
            )
            self._watches.append(tasks.spawn(watch.run(), name=f"watch {replica}"))
        for listener in self._listeners:
            await listener.start()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let what runs finish within `drain_s`, or until `hurry`; end the rest with an error."""
        drained = tasks.spawn(self._handlers.drained(), name="drain")
        hurried = tasks.spawn(_wait(hurry), name="hurry")
        await asyncio.wait(
            {drained, hurried},
            timeout=self._config.forward.drain_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not drained.done():
            self._handlers.end_all()
            await asyncio.wait({drained}, timeout=_END_S)
        await tasks.stop(drained, hurried)

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.close()
        await tasks.stop(*self._watches)
        self.pump.close()
        for upstream in self._upstreams.values():
            upstream.close()
        await self.quota.close()
        await self.ledger.close()
        await self.registry.close()
        await self.store.close()

    def _make_listeners(self) -> list[Listener]:
        config = self._config
        app = web.Application(client_max_size=config.listen.body_max_bytes)
        listeners = [Listener(app, host=config.listen.host, port=config.listen.port)]
        admin_app = app
        if config.admin.port is not None:
            admin_app = web.Application()
            listeners.append(Listener(admin_app, host=config.admin.host, port=config.admin.port))
        services = AdminServices(
            registry=self.registry,
            quota=self.quota,
            ledger=self.ledger,
            dispatcher=self.pump.dispatcher,
            changed=self.pump.wake,
        )
        add_admin_routes(admin_app, services, config.admin.key)
        self._handlers.add_routes(app)
        Models(self.registry, self.pump.dispatcher).add_routes(app)
        Probes(
            registry=self.registry,
            store=self.store,
            quota=self.quota,
            ledger=self.ledger,
            pump=self.pump,
            metrics=self.metrics,
            draining=lambda: self._handlers.draining,
        ).add_routes(app)
        return listeners

    def _gauges(self) -> None:
        dispatcher, clock = self.pump.dispatcher, self.pump.clock

        def up() -> float:
            return sum(one.state is ReplicaState.UP for one in dispatcher.view(clock()))

        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("in_flight", "Requests at replicas.", lambda: dispatcher.in_flight),
            ("queued", "Requests that wait for a replica.", lambda: dispatcher.queued),
            ("replicas_up", "Replicas that report and take requests.", up),
            ("store_degraded", "1: quotas are decided locally.", lambda: self.quota.degraded),
            (
                "ledger_backlog_bytes",
                "Ledger records not yet in the store.",
                lambda: self.ledger.backlog_bytes,
            ),
        ]
        for name, text, read in gauges:
            self.metrics.watch(name, text, read)


async def run(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT; a second one hurries the drain."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    gateway = Gateway(config)
    try:
        await gateway.start()
        print(f"loraplex gateway ready on {gateway.url}", flush=True)
        await stop.wait()
        await gateway.drain(hurry)
    finally:
        await gateway.close()


def upstreams(config: GatewayConfig) -> dict[ReplicaId, Upstream]:
    """Raises BadSettings for two replicas of one name, or an address that is none."""
    found: dict[ReplicaId, Upstream] = {}
    for entry in config.fleet.replicas:
        if entry.id in found:
            raise BadSettings(f"fleet.replicas: two replicas are named {entry.id!r}")
        try:
            found[ReplicaId(entry.id)] = Upstream(
                entry.url, connect_timeout_s=config.forward.connect_timeout_s
            )
        except ValueError as error:
            raise BadSettings(f"fleet.replicas: {entry.id}: {error}") from error
    return found


def _dispatcher(config: GatewayConfig) -> Dispatcher:
    router, queue = config.router, config.queue
    return Dispatcher(
        load_factor=router.load_factor,
        load_floor=router.load_floor,
        vnodes=router.vnodes,
        service_s=router.service_s,
        host_load_s=router.host_load_s,
        disk_load_s=router.disk_load_s,
        hop_s=router.hop_s,
        per_tenant_max=queue.per_tenant_max,
        ttl_s=queue.ttl_s,
        input_weight=queue.input_weight,
        output_weight=queue.output_weight,
        warm_wait_s=queue.warm_wait_s,
        silence_heartbeats=config.fleet.silence_heartbeats,
    )


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
