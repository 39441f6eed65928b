"""Commands of the adapter cache: what the engine thread must do with memory, in this order."""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import AdapterId
from shared.messages import Tier


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a version into an empty slot; from DISK it goes through host memory (`read`)."""

    adapter: AdapterId
    digest: str
    slot: int
    tier: Tier


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring a copy to host memory from afar, however long it takes: no slot waits for it."""

    adapter: AdapterId
    digest: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Empty the slot."""

    adapter: AdapterId
    slot: int


@dataclass(frozen=True, slots=True)
class EvictHost:
    """Let go of the copy in host memory, if there is one."""

    adapter: AdapterId
    digest: str


Command = Load | Fetch | Evict | EvictHost
