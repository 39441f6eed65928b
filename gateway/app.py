"""Where the gateway's objects meet, start in order, and stop in order.

Stopping: readiness falls at once and nothing new is taken (503); running streams get `drain_s`;
then, or at a second signal, what still runs is ended with an error its client can read.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aiohttp import web

from gateway.admin.api import AdminServices, add_admin_routes
from gateway.admin.joins import Joins, add_join_routes
from gateway.completion.auth import Door
from gateway.completion.forward import Forwarder
from gateway.completion.handlers import Handlers
from gateway.completion.idempotency import Idempotency
from gateway.completion.models import Models
from gateway.config import GatewayConfig
from gateway.console.page import add_console_routes
from gateway.edge.listener import Listener
from gateway.edge.throttle import Throttle
from gateway.fleet.deciding import dispatcher_of
from gateway.fleet.fairness import Fairness
from gateway.fleet.placing import Placer
from gateway.fleet.pump import Pump
from gateway.fleet.schedule import Schedule
from gateway.fleet.sharing import Sharing
from gateway.gauges import add_gauges
from gateway.members import JOINED, Links, Members
from gateway.metrics import Metrics
from gateway.parts import journal_of
from gateway.probes import Probes
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota
from gateway.state.registry import Registry
from gateway.store.redis import Store
from shared import tasks

_END_S: Final = 2.0  # ended requests need one turn of the loop; this is for a loaded one


class Gateway:
    def __init__(self, config: GatewayConfig, *, shared: bool = False) -> None:
        """`shared`: one of several workers on one port. Raises BadSettings; touches nothing."""
        self._config = config
        self._shared = shared
        self.metrics = Metrics()
        self.store = Store(
            config.store.url, prefix=config.store.prefix, timeout_s=config.store.timeout_s
        )
        self.registry = Registry(self.store)
        self.quota = Quota(self.store, config.quota, refused=self.metrics.over_quota)
        self.ledger = Ledger(self.store, config.store.spool)
        links = Links()
        self._throttle = Throttle(config.listen.failed_keys_per_min)
        self._door = Door(self.registry, self._throttle, config.listen.client_ip_header)
        self._placer = Placer(
            links.upstreams, token=config.fleet.token, ordered=self.metrics.ordered
        )
        self.pump = Pump(
            dispatcher_of(config),
            observe=self.metrics.decision,
            judged=self.metrics.verdict,
            carry_out=self._placer.carry_out,
        )
        self.members = Members(
            config,
            links,
            pump=self.pump,
            registry=self.registry,
            store=self.store,
            metrics=self.metrics,
        )
        self._links = links
        self._journal = journal_of(config)
        self._handlers = self._make_handlers(links)
        self._listeners = self._make_listeners()
        self._sharing = Sharing(self.store, self.pump.dispatcher)
        self._fairness = Fairness(self.pump.dispatcher)
        self._watches: list[asyncio.Task[None]] = []
        add_gauges(
            self.metrics,
            pump=self.pump,
            quota=self.quota,
            ledger=self.ledger,
            members=self.members,
            store=self.store,
            fairness=self._fairness,
        )

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
        if self._config.placement.schedule:
            schedule = Schedule(self._config.placement.schedule, self.pump)
            self._watches.append(tasks.spawn(schedule.run(), name="schedule"))
        await self.members.start()
        self._watches.append(tasks.spawn(self._sharing.run(), name="shares"))
        self._watches.append(tasks.spawn(self._fairness.run(), name="fairness"))
        for listener in self._listeners:
            await listener.start()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Let what runs finish within `drain_s`, or until `hurry`; end the rest with an error."""
        drained = tasks.spawn(self._handlers.running.drained(), name="drain")
        hurried = tasks.spawn(hurry.wait(), name="hurry")
        await asyncio.wait(
            {drained, hurried},
            timeout=self._config.forward.drain_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not drained.done():
            self._handlers.running.end_all()
            await asyncio.wait({drained}, timeout=_END_S)
        await tasks.stop(drained, hurried)

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.close()
        await tasks.stop(*self._watches)
        self.pump.close()
        await self._placer.close()
        await self.members.close()
        await self.quota.close()
        await self.ledger.close()
        await self._journal.close()
        await self.registry.close()
        await self.store.close()

    def _make_handlers(self, links: Links) -> Handlers:
        return Handlers(
            config=self._config,
            registry=self.registry,
            door=self._door,
            quota=self.quota,
            ledger=self.ledger,
            pump=self.pump,
            forwarder=Forwarder(
                links.upstreams,
                config=self._config.forward,
                token=self._config.fleet.token,
                metrics=self.metrics,
                timeouts=links.timeouts,
                dialects=links.dialects,
            ),
            idempotency=Idempotency(self.store),
            metrics=self.metrics,
            journal=self._journal,
        )

    def _make_listeners(self) -> list[Listener]:
        config = self._config
        app = web.Application(client_max_size=config.listen.body_max_bytes)
        listen = config.listen
        listeners = [
            Listener(
                app,
                host=listen.host,
                port=listen.port,
                limits=listen,
                shared=self._shared,
                serve=self._handlers.serve,
                short=self._handlers.short.begin,
                stall_s=config.forward.idle_timeout_s,
            )
        ]
        admin_app = app
        if config.admin.port is not None:
            admin_app = web.Application()
            listeners.append(
                Listener(admin_app, host=config.admin.host, port=config.admin.port, limits=listen)
            )
        services = AdminServices(
            registry=self.registry,
            quota=self.quota,
            ledger=self.ledger,
            dispatcher=self.pump.dispatcher,
            changed=self.pump.wake,
            upstreams=self._links.natives,
            throttle=self._throttle,
            refused=self.members.refused,
            found_by=self.members.found_by,
        )
        joins = Joins(
            self.members.joining,
            lease_s=config.discovery.lease_s,
            listed=lambda replica: self.members.found_by(replica) not in ("", JOINED),
        )
        add_join_routes(admin_app, joins, config.fleet.token, self._throttle)
        add_admin_routes(admin_app, services, config.admin.key)
        add_console_routes(admin_app, enabled=bool(config.admin.key))
        self._handlers.add_routes(app)
        Models(self.registry, self.pump.dispatcher, self._door).add_routes(app)
        probes = Probes(
            registry=self.registry,
            store=self.store,
            quota=self.quota,
            ledger=self.ledger,
            pump=self.pump,
            metrics=self.metrics,
            draining=lambda: self._handlers.running.draining,
        )
        probes.add_routes(app, one_of_many=self._shared)
        if admin_app is not app:
            probes.add_routes(admin_app)
        return listeners


async def run(
    config: GatewayConfig, *, until: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT; a second one hurries the drain.

    `until` is for one of several workers on the port: what it waits for ends it as well."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (hurry if stop.is_set() else stop).set()

    async def gone(wait: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await wait()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    gateway = Gateway(config, shared=until is not None)
    others = [] if until is None else [tasks.spawn(gone(until), name="supervisor")]
    try:
        await gateway.start()
        _settle_memory()
        print(f"loraplex gateway ready on {gateway.url}", flush=True)
        await stop.wait()
        await gateway.drain(hurry)
    finally:
        await tasks.stop(*others)
        await gateway.close()


def _settle_memory() -> None:
    """What start has made stays: never look at it again for garbage, and look at the rest rarely.

    A request leaves hardly a cycle behind; the usual 700 objects would mean a look every few.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
