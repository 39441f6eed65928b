"""What tenants were served at other gateways, out of what those say of themselves.

Every gateway says its totals, never differences: a message that is lost or comes twice costs
freshness, not truth. A total that is smaller than before began anew (the gateway was restarted).
The first totals that are heard of a gateway are a beginning, not service: they may be hours old.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shared.ids import TenantId


class Service(NamedTuple):
    """Of one tenant, in cost units."""

    served: float  # settled, since the gateway began to count
    running: float  # in flight, by estimate


Told = Mapping[str, Mapping[TenantId, Service]]
"""By gateway: its tenants, now."""


class Account:
    """What this gateway says: `tell` before each exchange."""

    def __init__(self) -> None:
        self._totals: dict[TenantId, float] = {}

    def tell(
        self, served: Mapping[TenantId, float], running: Mapping[TenantId, float]
    ) -> dict[TenantId, Service]:
        """`served` since the last time. Who neither had anything nor runs is left out, and counted
        from nothing when it comes back: so as many are kept as were served of late."""
        for tenant, cost in served.items():
            self._totals[tenant] = self._totals.get(tenant, 0.0) + cost
        self._totals = {tenant: self._totals.get(tenant, 0.0) for tenant in {**served, **running}}
        return {
            tenant: Service(total, running.get(tenant, 0.0))
            for tenant, total in self._totals.items()
        }


class Elsewhere:
    """What this gateway hears."""

    def __init__(self) -> None:
        self._last: dict[str, dict[TenantId, float]] = {}
        self._running: set[TenantId] = set()

    def heard(self, told: Told) -> dict[TenantId, Service]:
        """Of each tenant: what it had since the last time over all other gateways, and what it has
        in flight there; with those that had something in flight and have no more."""
        found = {tenant: Service(0.0, 0.0) for tenant in self._running}
        for gateway, tenants in told.items():
            last = self._last.get(gateway)
            for tenant, now in tenants.items():
                before = now.served if last is None else last.get(tenant, 0.0)
                fresh = now.served - before if now.served >= before else now.served
                had, runs = found.get(tenant, Service(0.0, 0.0))
                found[tenant] = Service(had + fresh, runs + now.running)
        self._last = {
            gateway: {tenant: now.served for tenant, now in tenants.items()}
            for gateway, tenants in told.items()
        }
        self._running = {tenant for tenant, (_, runs) in found.items() if runs > 0}
        return found
