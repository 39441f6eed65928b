"""What machines ask of the process itself: is it alive, is it ready, what has it counted.

And the answer to every address that is none, which names the one that was probably meant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final

import orjson
from aiohttp import web

from gateway.core.dispatcher import ReplicaState
from gateway.edge.framework import respond
from gateway.errors import GatewayError, NoSuchRoute, WrongMethod
from gateway.fleet.pump import Pump
from gateway.metrics import Metrics
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota
from gateway.state.registry import Registry
from gateway.store.redis import Store
from shared.wire import REQUEST_ID

_METHODS: Final = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/models": "GET",
    "/healthz": "GET",
    "/readyz": "GET",
    "/metrics": "GET",
}


@dataclass(frozen=True, slots=True)
class Probes:
    registry: Registry
    store: Store
    quota: Quota
    ledger: Ledger
    pump: Pump
    metrics: Metrics
    draining: Callable[[], bool]

    def add_routes(self, app: web.Application, *, one_of_many: bool = False) -> None:
        """Last of all: one route here takes every address that no other has.

        `one_of_many`: workers share this port, and whose counts one would get is chance.
        """
        app.router.add_get("/healthz", self.healthz, allow_head=False)
        app.router.add_get("/readyz", self.readyz, allow_head=False)
        exposition = counts_of_one if one_of_many else self.exposition
        app.router.add_get("/metrics", exposition, allow_head=False)
        app.router.add_route("*", "/{path:.*}", elsewhere)

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        """The loop turns; nothing else is asked, so that a store outage restarts no gateway."""
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        detail = self.detail()
        return web.Response(
            status=200 if detail["ready"] else 503,
            body=orjson.dumps(detail),
            content_type="application/json",
        )

    async def exposition(self, request: web.Request) -> web.StreamResponse:
        text, kind = self.metrics.exposition()
        return web.Response(body=text, headers={"Content-Type": kind})

    def detail(self) -> dict[str, Any]:
        """`degraded` names what is worse than it should be, without making the gateway unready."""
        view = self.pump.dispatcher.view(self.pump.clock())
        replicas = [{"id": one.replica, "state": one.state} for one in view]
        some_up = any(one.state is ReplicaState.UP for one in view)
        degraded = {
            "store_away": self.store.away,
            "quota_local": self.quota.degraded,
            "ledger_spooled": self.store.away and self.ledger.backlog_bytes > 0,
            "no_replica": not some_up,
            "replica_away": some_up and any(one.state is not ReplicaState.UP for one in view),
        }
        return {
            "ready": self.registry.loaded and some_up and not self.draining(),
            "draining": self.draining(),
            "degraded": [name for name, so in degraded.items() if so],
            "registry": {"loaded": self.registry.loaded},
            "store": {
                "away": self.store.away,
                "reason": self.store.reason if self.store.away else "",
            },
            "ledger": {"backlog_bytes": self.ledger.backlog_bytes},
            "replicas": replicas,
        }


async def counts_of_one(request: web.Request) -> web.StreamResponse:
    error = NoSuchRoute(
        "Several workers share this port. Set admin.port: worker i serves its /metrics at that "
        "port + i."
    )
    return respond(error, {REQUEST_ID: f"req_{token_hex(16)}"})


async def elsewhere(request: web.Request) -> web.StreamResponse:
    return respond(_elsewhere(request.method, request.path), {REQUEST_ID: f"req_{token_hex(16)}"})


def _elsewhere(method: str, path: str) -> GatewayError:
    if (allowed := _allowed(path)) is not None:
        return WrongMethod(method, path, allowed)
    meant = "/" + "/".join(part for part in path.split("/") if part).replace("v1/v1/", "v1/")
    hint = f"; did you mean {meant}?" if meant != path and _allowed(meant) else "."
    return NoSuchRoute(f"There is no {method} {path}{hint}")


def _allowed(path: str) -> str | None:
    if path.startswith("/v1/models/") and not path.endswith("/"):
        return "GET"
    return _METHODS.get(path)
