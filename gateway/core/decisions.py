"""The words of the dispatcher: what comes in with a request, what comes out, what it can show."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.core.fleet import Replica, ReplicaState
from gateway.core.router import CandidateTerms, Choice, Kind
from gateway.core.terms import Base, Model
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, AdapterStatus, Tier


class RejectReason(StrEnum):
    QUEUE_FULL = "queue_full"  # the tenant has its bound waiting
    UNKNOWN_MODEL = "unknown_model"  # no replica has named this adapter
    NO_REPLICA = "no_replica"  # known, but no live replica could take it, even later
    EXPIRED = "expired"  # it waited ttl_s


class Arrival(NamedTuple):
    """A request at the door. Its token counts are estimates; `finish` brings the truth."""

    request: RequestId
    tenant: TenantId
    weight: float
    adapter: AdapterId | None  # None: the base model
    input_tokens: int
    output_tokens: int
    queue_max: int | None = None  # this tenant's own bound; None: per_tenant_max
    streams: bool = False  # its first token is told, and how long that took compared
    base: str = ""  # of a request without adapter: the base it names; "": whichever

    @property
    def model(self) -> Model:
        """What decides where it may go."""
        if self.adapter is not None:
            return self.adapter
        return Base(self.base) if self.base else None


class Placement(NamedTuple):
    """Where a request goes, and why."""

    choice: Choice
    queue_s: float  # since it arrived
    boot: str = ""  # the replica's life, as it last reported

    @property
    def replica(self) -> ReplicaId:
        return self.choice.replica

    @property
    def kind(self) -> Kind:
        return self.choice.kind

    @property
    def digest(self) -> str:
        """The adapter's version there; "" for the base model."""
        return self.choice.digest

    @property
    def terms(self) -> tuple[CandidateTerms, ...]:
        """Home, the chosen, and each that was refused though nearer."""
        return self.choice.terms


class Dispatch(NamedTuple):
    request: RequestId
    placement: Placement


@dataclass(frozen=True, slots=True)
class Reject:
    """Refused at the door."""

    request: RequestId
    why: RejectReason


@dataclass(frozen=True, slots=True)
class Evict:
    """Taken out of the queue."""

    request: RequestId
    why: RejectReason


Decision = Dispatch | Reject | Evict


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as the gateway sees it, for people."""

    replica: ReplicaId
    state: ReplicaState
    in_flight: int  # ours
    load: int  # ours and others'
    running: int  # as it last reported
    waiting: int
    capacity: int
    limit: int  # places now: fewer than its capacity in slow start, none beside a trial
    slow_start: float  # share of its places that it has; 1.0: it is wholly in
    leaving: bool  # it is drained as soon as others have what it has
    ejected_until: float | None  # on the dispatcher's clock
    ejected_for: str  # "failures" or "slow", of its last ejection
    slots: int
    pages_total: int
    pages_free: int
    max_model_len: int
    base: str
    boot: str
    reported_at: float | None  # on the dispatcher's clock
    service_s: float
    adapters: tuple[AdapterState, ...]  # FAILED ones included; empty while lost

    def by_tier(self) -> dict[Tier, tuple[AdapterId, ...]]:
        """Routable adapters, nearest tier first."""
        routable = [state for state in self.adapters if state.status is not AdapterStatus.FAILED]
        return {tier: tuple(s.adapter for s in routable if s.tier is tier) for tier in Tier}

    @classmethod
    def of(cls, mine: Replica, adapters: tuple[AdapterState, ...]) -> ReplicaView:
        said = mine.said
        return cls(
            replica=mine.id,
            state=mine.state,
            in_flight=mine.in_flight,
            load=mine.load,
            running=said.running if said else 0,
            waiting=said.waiting if said else 0,
            capacity=mine.capacity,
            limit=mine.limit,
            slow_start=mine.share,
            leaving=mine.leaving_by is not None,
            ejected_until=mine.breaker.until,
            ejected_for=mine.breaker.why,
            slots=mine.slots,
            pages_total=said.pages_total if said else 0,
            pages_free=said.pages_free if said else 0,
            max_model_len=said.max_model_len if said else 0,
            base=said.base if said else "",
            boot=said.boot if said else "",
            reported_at=mine.heard_at if said else None,
            service_s=mine.service_s,
            adapters=adapters,
        )
