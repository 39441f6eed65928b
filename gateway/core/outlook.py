"""The fleet, what it holds, and the router over both: what can be asked of the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.breaker import HealthRules
from gateway.core.census import Life
from gateway.core.decisions import ReplicaView
from gateway.core.fleet import Fleet
from gateway.core.placement import Placement, PlacementRules
from gateway.core.replica import ReplicaState
from gateway.core.residency import ResidencyMap
from gateway.core.router import CandidateTerms, Router
from gateway.core.scales import Scales
from gateway.core.terms import Choice, Model
from shared.ids import AdapterId, ReplicaId


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
        load_floor_share: float,
        host_load_s: float,
        disk_load_s: float,
        hop_s: float,
        warm_wait_s: float,
        placement: PlacementRules | None,
        reserve_share: float,
    ) -> None:
        self._residency = ResidencyMap()
        self._fleet = Fleet(
            service_s=service_s,
            silence_heartbeats=silence_heartbeats,
            rules=rules,
            vnodes=vnodes,
            reserve_share=reserve_share,
        )
        self._router = Router(
            residency=self._residency,
            fleet=self._fleet,
            scales=Scales(
                residency=self._residency,
                load_factor=load_factor,
                load_floor=load_floor,
                load_floor_share=load_floor_share,
                host_load_s=host_load_s,
                disk_load_s=disk_load_s,
                hop_s=hop_s,
                warm_wait_s=warm_wait_s,
            ),
        )
        self._handover_s = placement.handover_s if placement is not None else 0.0
        self._placement: Placement | None = None
        if placement is not None:
            self._placement = Placement(
                fleet=self._fleet, residency=self._residency, rules=placement
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

    def choice(self, model: Model, now: float) -> Choice | None:
        """Where a request would go; None while nobody has room for it. Nothing is sent."""
        return self._router.pick(model, frozenset(), now)

    def explain(self, model: Model, now: float) -> tuple[CandidateTerms, ...]:
        """Every replica with its terms, and why it could not be taken; nothing is sent."""
        return self._router.explain(model, now)

    def owners(self, adapter: AdapterId) -> tuple[ReplicaId, ...]:
        """Who is to hold it, as last planned; nobody without placement."""
        return () if self._placement is None else self._placement.owners(adapter)

    @property
    def placement_moves(self) -> int:
        """Adapters that were given an owner more, or another, since the gateway began."""
        return 0 if self._placement is None else self._placement.moves

    def base_of(self, replica: ReplicaId) -> str:
        """As it last said; "" before its first report."""
        mine = self._fleet.replicas.get(replica)
        return "" if mine is None or mine.said is None else mine.said.base

    def serves(self, replica: ReplicaId) -> bool:
        """It reports, and requests may go there."""
        mine = self._fleet.replicas.get(replica)
        return mine is not None and mine.serving

    def life(self, replica: ReplicaId) -> Life:
        """What its own words say of it."""
        mine = self._fleet.replicas.get(replica)
        if mine is None or mine.state is ReplicaState.UNKNOWN:
            return Life.SILENT
        if mine.state is ReplicaState.LOST:
            return Life.DRAINED if mine.draining else Life.SILENT
        return Life.HEARD

    def digest_at(self, replica: ReplicaId, adapter: AdapterId) -> str | None:
        """The version that it holds; None when it does not serve the adapter."""
        state = self._residency.holders(adapter).get(replica)
        return None if state is None else state.digest

    def in_use(self, replica: ReplicaId, adapter: AdapterId) -> int:
        """Our requests that run there with it."""
        mine = self._fleet.replicas.get(replica)
        use = None if mine is None else mine.ours.get(adapter)
        return 0 if use is None else use.requests

    def states(self) -> Mapping[ReplicaState, int]:
        """How many replicas are in each."""
        counts = dict.fromkeys(ReplicaState, 0)
        for mine in self._fleet.replicas.values():
            counts[mine.state] += 1
        return counts

    def view(self, now: float) -> tuple[ReplicaView, ...]:
        """Every replica, by name."""
        replicas = self._fleet.replicas
        return tuple(ReplicaView.of(replicas[r], self._residency.of(r)) for r in sorted(replicas))
