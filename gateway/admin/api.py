"""The admin API, `/admin/v1/…`: tenants, keys, adapters, prices, the fleet, usage, events.

Its key is not a tenant's: `Authorization: Bearer` with `admin.key`, compared in constant time. A
change is in the store when the reply is sent, and in every gateway within a second; it carries the
version that was read (`If-Match` with the ETag), or it wins whatever was read. Drain and resume are
this gateway's own: with several, say it to each, or to the replica itself.

Errors have OpenAI's shape and name the field. A 503 after a change means that its fate is
unknown: read before trying again. `/admin/openapi.json` describes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from gateway.admin.adapters import Adapters
from gateway.admin.call import answer, guarded, nowhere, switched_off
from gateway.admin.document import document
from gateway.admin.fleet import Fleet
from gateway.admin.ledger import Bills
from gateway.admin.tenants import Tenants
from gateway.core.dispatcher import Dispatcher
from gateway.edge.throttle import Throttle
from gateway.edge.upstream import Upstream
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota
from gateway.state.reconcile import Reconciler
from gateway.state.registry import Registry
from shared.clock import Clock, monotonic, wall
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState

PREFIX: Final = "/admin/v1/"
DOCUMENT_PATH: Final = "/admin/openapi.json"


@dataclass(frozen=True, slots=True)
class AdminServices:
    registry: Registry
    quota: Quota
    ledger: Ledger
    dispatcher: Dispatcher
    changed: Callable[[], None]  # wakes whoever polls the dispatcher
    clock: Clock = monotonic  # the dispatcher's
    wall: Clock = wall
    upstreams: Mapping[ReplicaId, Upstream] = field(default_factory=dict)
    throttle: Throttle = field(default_factory=Throttle)
    refused: Callable[[ReplicaId], Mapping[AdapterId, AdapterState]] = lambda replica: {}
    """Versions that a replica would not load, with its words."""
    found_by: Callable[[ReplicaId], str] = lambda replica: ""
    """What names a replica: the file, DNS, or that it joined."""


def add_admin_routes(app: web.Application, services: AdminServices, key: str) -> None:
    """Add the routes; with an empty `key` every address below /admin says how to get them."""
    if not key:
        app.router.add_route("*", r"/admin/{path:[\s\S]*}", switched_off)
        return
    registry, dispatcher = services.registry, services.dispatcher
    reconciler = Reconciler(services.ledger, dispatcher, services.upstreams, services.clock)
    parts = (
        Tenants(registry, services.quota, services.wall),
        Adapters(registry, dispatcher, services.refused, services.clock, services.wall),
        Fleet(registry, dispatcher, services.changed, services.found_by, services.clock),
        Bills(registry, services.ledger, reconciler, services.wall),
    )
    for part in parts:
        for method, path, handler in part.routes():
            call = guarded(handler, key, services.throttle)
            app.router.add_route(method, PREFIX + path, call)
    described = document()

    async def describe(request: web.Request) -> web.StreamResponse:
        return answer(described)

    app.router.add_route("GET", DOCUMENT_PATH, guarded(describe, key, services.throttle))
    app.router.add_route("*", r"/admin/{path:[\s\S]*}", guarded(nowhere, key, services.throttle))
