"""What came of a trace in a simulation, and the figures that runs are compared by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loadtests.stats import summarise
from loadtests.trace import Arrival
from shared.ids import ReplicaId
from shared.messages import Tier


@dataclass(frozen=True, slots=True)
class Finished:
    """Times in seconds from arrival; `tier` is where the adapter was, None for the base."""

    arrival: Arrival
    replica: ReplicaId
    kind: str  # the placement: home, warm, spill or cold
    tier: Tier | None
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    arrival: Arrival
    why: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Its replica was lost after the first token."""

    arrival: Arrival
    replica: ReplicaId


Outcome = Finished | Refused | Cut


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    served: int
    in_flight_mean: float
    in_flight_max: int


@dataclass(slots=True)
class Meter:
    """Requests in flight at one replica, integrated over time."""

    now: int = 0
    max: int = 0
    since: float = 0.0
    area: float = 0.0

    def set(self, count: int, at: float) -> None:
        self.area += self.now * (at - self.since)
        self.now, self.since, self.max = count, at, max(self.max, count)

    def load(self, served: int, now: float) -> ReplicaLoad:
        return ReplicaLoad(served, self.area / now if now else 0.0, self.max)


@dataclass(frozen=True, slots=True)
class Run:
    """Outcomes in the order of the trace's rows, and what replicas carried."""

    outcomes: tuple[Outcome, ...]
    replicas: Mapping[ReplicaId, ReplicaLoad]
    loads: Mapping[Tier, int]  # that a request waited for, by the tier they came from
    fetched: int  # copies brought to host memory ahead of use
    balance: tuple[tuple[int, float], ...]  # most and mean in flight, each tenth of a second
    ended_at_s: float

    @property
    def finished(self) -> tuple[Finished, ...]:
        return tuple(o for o in self.outcomes if isinstance(o, Finished))

    @property
    def refused(self) -> Counter[str]:
        return Counter(o.why for o in self.outcomes if isinstance(o, Refused))

    @property
    def cut(self) -> int:
        return sum(isinstance(o, Cut) for o in self.outcomes)

    def kinds(self) -> Counter[str]:
        return Counter(o.kind for o in self.finished)

    def tier_shares(self, *, after_s: float = 0.0) -> dict[Tier, float]:
        """Of the finished requests that named an adapter: where it was when they came."""
        tiers = Counter(
            o.tier for o in self.finished if o.tier is not None and o.arrival.at_s >= after_s
        )
        return {tier: tiers[tier] / tiers.total() if tiers else 0.0 for tier in Tier}

    def balanced(self, load_factor: float, *, after: float = 0.0) -> float:
        """Share of the samples after the first part in which most <= c * mean + 1."""
        samples = self.balance[int(after * len(self.balance)) :]
        within = sum(most <= load_factor * mean + 1 for most, mean in samples)
        return within / len(samples) if samples else 1.0

    def figures(self, *, load_factor: float = 1.25, skip: float = 0.0) -> dict[str, Any]:
        """`skip`: this first part of the trace, in which caches fill, is left out of times, hits
        and balance. `adapter_found_in`: where it was when its request came."""
        after_s = skip * self.outcomes[-1].arrival.at_s
        counted = [o for o in self.finished if o.arrival.at_s >= after_s]
        first = summarise(o.first_token_s for o in counted)
        shares = self.tier_shares(after_s=after_s)
        return {
            "arrived": len(self.outcomes),
            "finished": len(self.finished),
            "refused": dict(sorted(self.refused.items())),
            "cut": self.cut,
            "virtual_s": self.ended_at_s,
            "ttft_p50_ms": first.p50 * 1e3,
            "ttft_p99_ms": first.p99 * 1e3,
            "queue_p99_ms": summarise(o.queue_s for o in counted).p99 * 1e3,
            "adapter_found_in": {str(tier): share for tier, share in shares.items()},
            "disk_waits": sum(o.tier is Tier.DISK for o in counted),
            "balanced": self.balanced(load_factor, after=skip),
            "placed": dict(sorted(self.kinds().items())),
            "loads_from": {str(tier): count for tier, count in sorted(self.loads.items())},
            "fetched_ahead": self.fetched,
            "replicas": {
                str(name): {
                    "served": load.served,
                    "in_flight_mean": load.in_flight_mean,
                    "in_flight_max": load.in_flight_max,
                }
                for name, load in sorted(self.replicas.items())
            },
        }
