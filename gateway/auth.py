"""Who is asking: the tenant of a request's API key."""

from __future__ import annotations

from aiohttp import web

from gateway.errors import NotLoaded, Unauthenticated
from gateway.registry import Registry
from gateway.tenants import Tenant


def authenticate(request: web.Request, registry: Registry) -> Tenant:
    """`Authorization: Bearer KEY`, or `api-key: KEY` as Azure's clients send it.

    Raises Unauthenticated, the same for a missing key and a wrong one; NotLoaded while the
    gateway cannot know.
    """
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("api-key", "")
    tenant = registry.tenant_for_key(key.strip()) if key else None
    if tenant is None:
        if key and not registry.loaded:
            raise NotLoaded()
        raise Unauthenticated()
    return tenant
