"""The admin API's part about tenants: their limits, what is left of them, their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from aiohttp import web

from gateway.admin.call import Route, answer, if_match, listed, nothing, parsed
from gateway.admin.rows import key_row, limit_row
from gateway.state.quota import Quota
from gateway.state.registry import Registry
from gateway.state.tenants import (
    NO_LIMITS,
    BadField,
    Missing,
    Tenant,
    changed_adapter_limits,
    changed_limits,
)
from shared.clock import Clock

_FIELDS: Final = ("id", "weight", "models", "limits", "adapter_limits", "shadow")


class Tenants:
    def __init__(self, registry: Registry, quota: Quota, wall: Clock) -> None:
        self._registry = registry
        self._quota = quota
        self._wall = wall

    def routes(self) -> list[Route]:
        return [
            ("GET", "tenants", self.all),
            ("POST", "tenants", self.create),
            ("GET", "tenants/{tenant}", self.one),
            ("PATCH", "tenants/{tenant}", self.change),
            ("DELETE", "tenants/{tenant}", self.delete),
            ("GET", "tenants/{tenant}/quota", self.left),
            ("GET", "tenants/{tenant}/keys", self.keys),
            ("POST", "tenants/{tenant}/keys", self.key_create),
            ("DELETE", "tenants/{tenant}/keys/{key}", self.key_revoke),
            ("POST", "tenants/{tenant}/keys/{key}/rotate", self.key_rotate),
        ]

    async def all(self, request: web.Request) -> web.StreamResponse:
        return listed([self._row(tenant) for tenant in self._registry.tenants()])

    async def one(self, request: web.Request) -> web.StreamResponse:
        tenant = named(self._registry, request.match_info["tenant"])
        return answer(self._row(tenant), etag=tenant.version)

    async def create(self, request: web.Request) -> web.StreamResponse:
        fields = _shaped(await parsed(request, _FIELDS))
        if "id" not in fields:
            raise BadField("id", "is missing")
        fields["limits"] = changed_limits(NO_LIMITS, fields.get("limits"))
        given = fields.get("adapter_limits")
        fields["adapter_limits"] = changed_adapter_limits({}, given)
        made = await self._registry.create(fields.pop("id"), **fields)
        return answer(self._row(made), status=201, etag=made.version)

    async def change(self, request: web.Request) -> web.StreamResponse:
        fields = _shaped(await parsed(request, _FIELDS[1:]))
        tenant_id, expected = request.match_info["tenant"], if_match(request)
        changed = await self._registry.set(tenant_id, expect_version=expected, **fields)
        return answer(self._row(changed), etag=changed.version)

    async def delete(self, request: web.Request) -> web.StreamResponse:
        tenant_id = request.match_info["tenant"]
        await self._registry.delete(tenant_id, expect_version=if_match(request))
        return nothing()

    async def left(self, request: web.Request) -> web.StreamResponse:
        tenant = named(self._registry, request.match_info["tenant"])
        found = await self._quota.peek(tenant)
        for adapter in tenant.adapter_limits:
            lines = await self._quota.peek(tenant, adapter)
            found += [line for line in lines if line.model]
        rows = [limit_row(line) for line in found]
        return answer({"tenant": tenant.id, "degraded": self._quota.degraded, "limits": rows})

    async def keys(self, request: web.Request) -> web.StreamResponse:
        tenant = named(self._registry, request.match_info["tenant"])
        return listed([key_row(key) for key in self._registry.keys(tenant.id)])

    async def key_create(self, request: web.Request) -> web.StreamResponse:
        given = (await parsed(request, ("secret",))).get("secret")
        if given is not None and not isinstance(given, str):
            raise BadField("secret", "must be a string")
        key, secret = await self._registry.key_create(request.match_info["tenant"], given)
        return answer({**key_row(key), "tenant": key.tenant, "secret": secret}, status=201)

    async def key_rotate(self, request: web.Request) -> web.StreamResponse:
        grace_s = (await parsed(request, ("grace_s",))).get("grace_s", 0)
        tenant_id, old = request.match_info["tenant"], request.match_info["key"]
        key, secret = await self._registry.key_rotate(tenant_id, old, grace_s=grace_s)
        row = {**key_row(key), "tenant": key.tenant, "secret": secret, "replaces": old}
        return answer(row, status=201)

    async def key_revoke(self, request: web.Request) -> web.StreamResponse:
        await self._registry.key_revoke(request.match_info["tenant"], request.match_info["key"])
        return nothing()

    def _row(self, tenant: Tenant) -> dict[str, Any]:
        row = asdict(replace(tenant, adapter_limits=dict(tenant.adapter_limits)))
        return {**row, "keys": [key_row(key) for key in self._registry.keys(tenant.id)]}


def named(registry: Registry, tenant_id: str) -> Tenant:
    """The tenant, or Missing."""
    tenant = registry.tenant(tenant_id)
    if tenant is None:
        raise Missing(f"There is no tenant {tenant_id!r}.")
    return tenant


def _shaped(body: dict[str, Any]) -> dict[str, Any]:
    """The shapes that the registry cannot check, because it is given values of those types."""
    if not isinstance(body.get("models", []), list):
        raise BadField("models", 'must be a list of names, or ["*"]')
    if not isinstance(body.get("limits", {}), Mapping):
        raise BadField("limits", "must be an object")
    adapters = body.get("adapter_limits", {})
    if not isinstance(adapters, Mapping):
        raise BadField("adapter_limits", "must be an object: limits, or null, by adapter")
    for name, limits in adapters.items():
        if limits is not None and not isinstance(limits, Mapping):
            raise BadField(f"adapter_limits.{name}", "must be an object, or null")
    if "shadow" in body and not isinstance(body["shadow"], bool):
        raise BadField("shadow", "must be true or false")
    return body
