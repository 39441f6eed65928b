"""Who is asking: the tenant of a request's API key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from aiohttp import web

from gateway.errors import NotLoaded, Unauthenticated
from gateway.registry import Registry
from gateway.tenants import Tenant

Header = Callable[[str], str | None]
"""A header's value by its name in lower case; "" when it is given twice."""


def header_of(request: web.Request) -> Header:
    return partial(_header, request)


def authenticate(header: Header, registry: Registry) -> Tenant:
    """`Authorization: Bearer KEY`, or `api-key: KEY` as Azure's clients send it.

    Two `Authorization` headers are no key: a proxy before us may have read the other one.
    Raises Unauthenticated, the same for a missing key and a wrong one; NotLoaded while the
    gateway cannot know.
    """
    given = header("authorization")
    scheme, _, key = (given or "").partition(" ")
    if scheme.lower() != "bearer":
        key = "" if given == "" else header("api-key") or ""
    tenant = registry.tenant_for_key(key.strip()) if key else None
    if tenant is None:
        if key and not registry.loaded:
            raise NotLoaded()
        raise Unauthenticated()
    return tenant


def _header(request: web.Request, name: str) -> str | None:
    values = request.headers.getall(name, ())
    return values[0] if len(values) == 1 else "" if values else None
