"""The field's lesson on caches, worked once more: which tier an adapter's requests find it in.

50,000 requests for 500 adapters by Zipf 1.1; GPU slots over host slots, each least recently used.
A hit in a slot waits for nothing, one in host memory for the copy, the rest for the disk; what
comes from disk stays in host memory behind it. The dice are the linear congruential generator
x <- 1664525 x + 1013904223 mod 2^32 from seed 11, so that the figures are the same everywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from loadtests.popularity import zipf

SETTINGS: Final = ((8, 100), (32, 100), (32, 500), (128, 500))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    adapters: int = 500
    requests: int = 50_000
    skew: float = 1.1
    seed: int = 11
    host_ms: float = 3.0  # host memory to a slot
    disk_ms: float = 120.0  # disk to a slot

    def __post_init__(self) -> None:
        if self.adapters < 1 or self.requests < 1:
            raise ValueError("a lesson needs adapters and requests")


@dataclass(frozen=True, slots=True)
class Hits:
    """What one pair of tiers gave; shares of the requests."""

    gpu_slots: int
    host_slots: int
    gpu_hit: float
    host_hit: float
    disk_loads: int
    mean_wait_ms: float


def wanted(lesson: Lesson) -> Iterator[int]:
    """Ranks of the adapters that are asked for, in order."""
    upto = list(accumulate(zipf(lesson.adapters, lesson.skew)))
    state = lesson.seed
    for _ in range(lesson.requests):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        yield min(bisect_left(upto, state / 2**32), lesson.adapters - 1)


def hits(lesson: Lesson, *, gpu_slots: int, host_slots: int) -> Hits:
    """Raises ValueError when there is no slot."""
    if gpu_slots < 1 or host_slots < 1:
        raise ValueError(f"at least one slot in each tier, not {gpu_slots} and {host_slots}")
    gpu, host = _Tier(gpu_slots), _Tier(host_slots)
    in_gpu = in_host = 0
    for adapter in wanted(lesson):
        if gpu.use(adapter):
            in_gpu += 1
        elif host.use(adapter):
            in_host += 1
    total = lesson.requests
    disk = total - in_gpu - in_host
    wait_ms = (in_host * lesson.host_ms + disk * lesson.disk_ms) / total
    return Hits(gpu_slots, host_slots, in_gpu / total, in_host / total, disk, wait_ms)


class _Tier:
    """So many places; the least recently used leaves."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: OrderedDict[int, None] = OrderedDict()

    def use(self, adapter: int) -> bool:
        """Whether it was here; it is afterwards."""
        found = adapter in self._held
        self._held[adapter] = None
        self._held.move_to_end(adapter)
        if len(self._held) > self._places:
            self._held.popitem(last=False)
        return found
