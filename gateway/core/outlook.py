"""The fleet, what it holds, and the router over both: what can be asked of the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.breaker import HealthRules
from gateway.core.decisions import ReplicaView
from gateway.core.fleet import Fleet
from gateway.core.residency import ResidencyMap
from gateway.core.ring import AdapterRing
from gateway.core.router import CandidateTerms, Router
from shared.ids import AdapterId


class Outlook:
    def __init__(
        self,
        *,
        vnodes: int,
        service_s: float,
        silence_heartbeats: float,
        rules: HealthRules,
        load_factor: float,
        load_floor: int,
        host_load_s: float,
        disk_load_s: float,
        hop_s: float,
    ) -> None:
        self._ring = AdapterRing(vnodes=vnodes)
        self._residency = ResidencyMap()
        self._fleet = Fleet(service_s=service_s, silence_heartbeats=silence_heartbeats, rules=rules)
        self._router = Router(
            ring=self._ring,
            residency=self._residency,
            fleet=self._fleet,
            load_factor=load_factor,
            load_floor=load_floor,
            host_load_s=host_load_s,
            disk_load_s=disk_load_s,
            hop_s=hop_s,
        )

    def knows(self, model: str) -> bool:
        """A base, or an adapter that a replica serves, or did when it was lost (503, not 404)."""
        return model in self._fleet.bases or self._residency.knows(AdapterId(model))

    def bases(self) -> frozenset[str]:
        return self._fleet.bases

    def adapters(self) -> Mapping[AdapterId, str]:
        """What is routable, with its version: served by a replica that is not lost."""
        return self._residency.adapters()

    def digests(self, adapter: AdapterId) -> frozenset[str]:
        """Every version of it that is served; more than one while a new one is rolled out."""
        return frozenset(state.digest for state in self._residency.holders(adapter).values())

    def explain(self, adapter: AdapterId | None, now: float) -> tuple[CandidateTerms, ...]:
        """Every replica with its terms, and why it could not be taken; nothing is sent."""
        return self._router.explain(adapter, now)

    def view(self, now: float) -> tuple[ReplicaView, ...]:
        """Every replica, by name."""
        replicas = self._fleet.replicas
        return tuple(ReplicaView.of(replicas[r], self._residency.of(r)) for r in sorted(replicas))
