"""The admin API, `/admin/v1/…`: tenants, keys, what is left, the fleet, why a placement, usage.

Its key is not a tenant's: `Authorization: Bearer` with `admin.key`, compared in constant time. A
change is in the store when the reply is sent, and in every gateway within a second. Drain and
resume are this gateway's own: with several, say it to each, or to the replica itself.

Errors have OpenAI's shape and name the field. A 503 after a change means that its fate is
unknown: read before trying again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from aiohttp import web

from gateway.admin_call import (
    Handler,
    answer,
    asked,
    guarded,
    if_match,
    iso,
    listed,
    moment,
    nowhere,
    parsed,
    switched_off,
)
from gateway.admin_rows import adapter_row, chosen, key_row, replica_row
from gateway.core.dispatcher import Base, Dispatcher, ReplicaView
from gateway.errors import ModelNotFound
from gateway.ledger import Ledger
from gateway.limits import LimitState
from gateway.quota import Quota
from gateway.registry import Registry
from gateway.tenants import BadField, Limits, Missing, Tenant, changed_limits
from shared.clock import Clock, monotonic, wall
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState

_TENANT_FIELDS: Final = ("id", "weight", "models", "limits")
_DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class AdminServices:
    registry: Registry
    quota: Quota
    ledger: Ledger
    dispatcher: Dispatcher
    changed: Callable[[], None]  # wakes whoever polls the dispatcher
    clock: Clock = monotonic  # the dispatcher's
    wall: Clock = wall


def add_admin_routes(app: web.Application, services: AdminServices, key: str) -> None:
    """Add the routes; with an empty `key` every address below /admin says how to get them."""
    if not key:
        app.router.add_route("*", "/admin/{path:.*}", switched_off)
        return
    api = _Admin(services)
    routes: list[tuple[str, str, Handler]] = [
        ("GET", "tenants", api.tenants),
        ("POST", "tenants", api.tenant_create),
        ("GET", "tenants/{tenant}", api.tenant),
        ("PATCH", "tenants/{tenant}", api.tenant_change),
        ("DELETE", "tenants/{tenant}", api.tenant_delete),
        ("GET", "tenants/{tenant}/quota", api.tenant_quota),
        ("GET", "tenants/{tenant}/keys", api.keys),
        ("POST", "tenants/{tenant}/keys", api.key_create),
        ("DELETE", "tenants/{tenant}/keys/{key}", api.key_revoke),
        ("GET", "adapters", api.adapters),
        ("GET", "adapters/{adapter:.+}", api.adapter),
        ("GET", "replicas", api.replicas),
        ("POST", "replicas/{replica}/drain", api.drain),
        ("POST", "replicas/{replica}/resume", api.resume),
        ("GET", "residency", api.residency),
        ("GET", "explain", api.explain),
        ("GET", "usage", api.usage),
    ]
    for method, path, handler in routes:
        app.router.add_route(method, f"/admin/v1/{path}", guarded(handler, key))
    app.router.add_route("*", "/admin/{path:.*}", guarded(nowhere, key))


class _Admin:
    def __init__(self, services: AdminServices) -> None:
        self._registry = services.registry
        self._quota = services.quota
        self._ledger = services.ledger
        self._dispatcher = services.dispatcher
        self._changed = services.changed
        self._clock = services.clock
        self._wall = services.wall

    # tenants and keys

    async def tenants(self, request: web.Request) -> web.StreamResponse:
        return listed([self._tenant_row(tenant) for tenant in self._registry.tenants()])

    async def tenant(self, request: web.Request) -> web.StreamResponse:
        tenant = self._named(request.match_info["tenant"])
        return answer(self._tenant_row(tenant), etag=tenant.version)

    async def tenant_create(self, request: web.Request) -> web.StreamResponse:
        fields = _tenant_fields(await parsed(request, _TENANT_FIELDS))
        if "id" not in fields:
            raise BadField("id", "is missing")
        fields["limits"] = changed_limits(Limits(), fields.get("limits"))
        made = await self._registry.create(fields.pop("id"), **fields)
        return answer(self._tenant_row(made), status=201, etag=made.version)

    async def tenant_change(self, request: web.Request) -> web.StreamResponse:
        fields = _tenant_fields(await parsed(request, _TENANT_FIELDS[1:]))
        tenant_id, expected = request.match_info["tenant"], if_match(request)
        changed = await self._registry.set(tenant_id, expect_version=expected, **fields)
        return answer(self._tenant_row(changed), etag=changed.version)

    async def tenant_delete(self, request: web.Request) -> web.StreamResponse:
        tenant_id = request.match_info["tenant"]
        await self._registry.delete(tenant_id, expect_version=if_match(request))
        return web.Response(status=204)

    async def tenant_quota(self, request: web.Request) -> web.StreamResponse:
        tenant = self._named(request.match_info["tenant"])
        left: LimitState = await self._quota.peek(tenant)
        return answer({"tenant": tenant.id, "degraded": self._quota.degraded, **asdict(left)})

    async def keys(self, request: web.Request) -> web.StreamResponse:
        tenant = self._named(request.match_info["tenant"])
        return listed([key_row(key) for key in self._registry.keys(tenant.id)])

    async def key_create(self, request: web.Request) -> web.StreamResponse:
        given = (await parsed(request, ("secret",))).get("secret")
        if given is not None and not isinstance(given, str):
            raise BadField("secret", "must be a string")
        key, secret = await self._registry.key_create(request.match_info["tenant"], given)
        return answer({**key_row(key), "tenant": key.tenant, "secret": secret}, status=201)

    async def key_revoke(self, request: web.Request) -> web.StreamResponse:
        await self._registry.key_revoke(request.match_info["tenant"], request.match_info["key"])
        return web.Response(status=204)

    def _named(self, tenant_id: str) -> Tenant:
        tenant = self._registry.tenant(tenant_id)
        if tenant is None:
            raise Missing(f"There is no tenant {tenant_id!r}.")
        return tenant

    def _tenant_row(self, tenant: Tenant) -> dict[str, Any]:
        return {**asdict(tenant), "keys": [key_row(k) for k in self._registry.keys(tenant.id)]}

    # the fleet

    async def adapters(self, request: web.Request) -> web.StreamResponse:
        places = self._places()
        return listed([adapter_row(name, places[name]) for name in sorted(places)])

    async def adapter(self, request: web.Request) -> web.StreamResponse:
        name = AdapterId(request.match_info["adapter"])
        if name not in (places := self._places()):
            raise Missing(f"No replica has an adapter {name!r}.")
        return answer(adapter_row(name, places[name]))

    async def replicas(self, request: web.Request) -> web.StreamResponse:
        now = self._clock()
        return listed([replica_row(view, now) for view in self._dispatcher.view(now)])

    async def residency(self, request: web.Request) -> web.StreamResponse:
        return listed(
            [
                {
                    "replica": view.replica,
                    "state": view.state,
                    "slots": view.slots,
                    "adapters": [asdict(state) for state in view.adapters],
                }
                for view in self._dispatcher.view(self._clock())
            ]
        )

    async def drain(self, request: web.Request) -> web.StreamResponse:
        return self._turned(request, self._dispatcher.leave)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        return self._turned(request, self._dispatcher.resume)

    def _turned(
        self, request: web.Request, turn: Callable[[ReplicaId, float], None]
    ) -> web.StreamResponse:
        replica, now = ReplicaId(request.match_info["replica"]), self._clock()
        turn(replica, now)
        self._changed()
        for view in self._dispatcher.view(now):
            if view.replica == replica:
                return answer(replica_row(view, now))
        raise Missing(f"There is no replica {replica!r} in this gateway's fleet.")

    def _places(self) -> dict[AdapterId, list[tuple[ReplicaView, AdapterState]]]:
        found: dict[AdapterId, list[tuple[ReplicaView, AdapterState]]] = {}
        for view in self._dispatcher.view(self._clock()):
            for state in view.adapters:
                found.setdefault(state.adapter, []).append((view, state))
        return found

    # questions

    async def explain(self, request: web.Request) -> web.StreamResponse:
        """Where a request would go now. A model the tenant may not use is as good as unknown."""
        tenant = self._named(asked(request, "tenant"))
        model = asked(request, "model")
        if not (self._dispatcher.knows(model) and self._registry.may_use(tenant, model)):
            raise ModelNotFound(model)
        base = model in self._dispatcher.bases()
        terms = self._dispatcher.explain(Base(model) if base else AdapterId(model), self._clock())
        return answer(
            {
                "tenant": tenant.id,
                "model": model,
                "chosen": chosen(terms, base=base),
                "owners": self._dispatcher.owners(AdapterId(model)),
                "candidates": [
                    {**asdict(one), "expected_s": one.expected_s, "refused": one.refused}
                    for one in terms
                ],
            }
        )

    async def usage(self, request: web.Request) -> web.StreamResponse:
        end = moment(request, "to", default=self._wall())
        start = moment(request, "from", default=end - _DAY_S)
        by = tuple(name for name in request.query.get("by", "tenant").split(",") if name)
        rows = await self._ledger.usage(start, end, by)
        return answer({"from": iso(start), "to": iso(end), "by": by, "data": rows})


def _tenant_fields(body: dict[str, Any]) -> dict[str, Any]:
    """The shapes that the registry cannot check, because it is given values of those types."""
    models, limits = body.get("models", []), body.get("limits", {})
    if not isinstance(models, list):
        raise BadField("models", 'must be a list of names, or ["*"]')
    if not isinstance(limits, Mapping):
        raise BadField("limits", "must be an object")
    return body
