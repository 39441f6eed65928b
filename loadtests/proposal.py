"""Proposal: what a plan says, as values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loadtests.demand import Demand
from loadtests.machine import Machine
from loadtests.prices import Prices


class Level(StrEnum):
    OK = "ok"  # as it should be
    DO = "do"  # something to set or to start
    WARNING = "warning"  # the plan does not hold before this is dealt with


@dataclass(frozen=True, slots=True)
class Advice:
    """One line of a plan: what, why, and what happens otherwise."""

    topic: str
    level: Level
    say: str
    because: str
    otherwise: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What the plan must reach, and what is settled already."""

    ttft_p99_s: float = 0.2
    utilisation: float = 0.75  # of the replicas' places in the busiest stretch
    copies: int = 2  # of each adapter in the fleet's host memory, where it fits
    host_share: float = 0.9  # of a host tier that the gateway plans (placement.host_share)
    headroom: float = 2.0  # of quotas over what is expected
    merge_share: float = 0.7  # of a replica's work that one adapter must bring to get its own
    replicas: int | None = None
    slots: int | None = None
    host_slots: int | None = None

    def __post_init__(self) -> None:
        if self.ttft_p99_s <= 0 or not 0 < self.utilisation <= 1 or not 0 < self.host_share <= 1:
            raise ValueError("the target is above 0; utilisation and host_share lie in 0..1")
        if self.copies < 1 or self.headroom < 1 or self.merge_share <= 0:
            raise ValueError("copies and headroom are at least 1, the merge share above 0")
        for name in ("replicas", "slots", "host_slots"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: at least 1, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Replicas that serve the same adapters; sizes are of one replica."""

    name: str
    replicas: int
    slots: int
    slots_max: int  # that GPU memory has room for
    host_slots: int
    host_covers: bool  # the pool's host memory holds every one of its adapters
    max_rank: int
    slot_bytes: float
    demand: Demand
    merged: str = ""  # folded into the base: it serves this adapter and nothing else

    @property
    def host_bytes(self) -> float:
        return self.host_slots * self.demand.mean_bytes

    @property
    def shared(self) -> bool:
        return not self.merged

    def prices(self, machine: Machine) -> Prices:
        return machine.prices(
            slots=self.slots,
            host_max=self.host_slots,
            size_bytes=self.demand.mean_bytes,
            slot_bytes=self.slot_bytes,
            longest=self.demand.longest_tokens,
        )

    def cost_per_hour(self, machine: Machine) -> float:
        host = self.host_bytes / 1e9 * machine.host_gb_per_hour
        return self.replicas * (machine.replica_per_hour + host)


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits and weight of a tenant."""

    tenant: str
    requests_per_min: int
    tokens_per_min: int
    concurrency: int
    weight: float


@dataclass(frozen=True, slots=True)
class Proposal:
    pools: tuple[Pool, ...]  # the shared one first
    advice: tuple[Advice, ...]  # in the order in which it is to be followed
    pinned: tuple[str, ...]
    quotas: tuple[Quota, ...]

    def cost_per_hour(self, machine: Machine) -> float:
        return sum(pool.cost_per_hour(machine) for pool in self.pools)
