"""Who is asking: the tenant of a request's API key."""

from __future__ import annotations

from collections.abc import Callable

from gateway.edge.throttle import Throttle
from gateway.errors import NotLoaded, TooManyFailures, Unauthenticated
from gateway.state.registry import Registry
from gateway.state.tenants import Tenant

Header = Callable[[str], str | None]
"""A header's value by its name in lower case; "" when it is given twice."""


class Door:
    """`admit` is asked once a request."""

    def __init__(self, registry: Registry, throttle: Throttle, ip_header: str = "") -> None:
        self._registry = registry
        self._throttle = throttle
        self._ip_header = ip_header.lower()

    def admit(self, header: Header, peer: Callable[[], str]) -> Tenant:
        """`Authorization: Bearer KEY`, or `api-key: KEY` as Azure's clients send it.

        Two `Authorization` headers are no key: a proxy before us may have read the other one.
        Raises Unauthenticated, the same for a missing key and a wrong one; TooManyFailures when too
        many wrong ones came from that address; NotLoaded while the gateway cannot know.
        """
        given = header("authorization")
        scheme, _, key = (given or "").partition(" ")
        if scheme.lower() != "bearer":
            key = "" if given == "" else header("api-key") or ""
        tenant = self._registry.tenant_for_key(key.strip()) if key else None
        if tenant is not None and not self._throttle.armed:
            return tenant
        if key and not self._registry.loaded:
            raise NotLoaded()
        address = self._address(header, peer)
        wait_s = self._throttle.shut(address, "" if tenant is None else tenant.id)
        if wait_s > 0 and key:
            raise TooManyFailures(wait_s)
        if tenant is None:
            if key:
                self._throttle.failed(address)
            raise Unauthenticated()
        self._throttle.passed(address, tenant.id)
        return tenant

    def _address(self, header: Header, peer: Callable[[], str]) -> str:
        """As the proxy before us says, which writes last; else who has dialled."""
        told = header(self._ip_header) if self._ip_header else None
        return told.rpartition(",")[2].strip() if told else peer()
