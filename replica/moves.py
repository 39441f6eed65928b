"""Weights on their way: from disk or store to host memory, and from there into a slot."""

from __future__ import annotations

from dataclasses import dataclass

from replica.core.host_tier import Version
from replica.engine.flight import Arrival
from shared.messages import Tier


@dataclass(slots=True)
class Read:
    remote: bool
    begun_at: float
    slot: int | None = None  # it is to be filled from this
    wanted: bool = False  # the cache asked for a copy; neither: it is read ahead

    @property
    def ahead(self) -> bool:
        return self.slot is None and not self.wanted


@dataclass(frozen=True, slots=True, eq=False)
class Filling:
    arrival: Arrival | None  # None: it is there
    version: Version
    slot: int
    tier: Tier  # it comes from
    begun_at: float
    copied_at: float  # when its copy to the device began
    size_bytes: int
