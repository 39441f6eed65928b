"""Tiers: carry out what the adapter cache decides. Disk to host on threads of its own, host to slot
between two steps.

Laws: everything but the read itself happens on the engine thread, so other rows go on decoding
while a disk is slow; one version is read once at a time, however many want it; a load that was
asked for is answered once, by `loaded` or `load_failed`; weights enter a slot only if their digest
is the one that was asked for; copies fetched ahead are read one after another, so that they never
stand before a load that a request waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from replica.core.adapter_cache import AdapterCache
from replica.core.commands import Command, Evict, EvictHost, Load
from replica.core.host_tier import Version
from replica.engine.adapter_store import BadAdapter, HostAdapter
from replica.engine.runner import Runner
from replica.metrics import Metrics
from shared.clock import Clock
from shared.ids import AdapterId
from shared.messages import Tier

_log = logging.getLogger(__name__)

_PASSING: Final = frozenset({"unreadable", "changed"})
"""Codes of BadAdapter that accuse the disk or the moment, not the adapter."""


class Keeper(Protocol):
    """Who knows where adapters are read from, and hears what reading found."""

    def read(self, adapter: AdapterId) -> HostAdapter:
        """On a reader thread; may block, and raises BadAdapter."""
        ...

    def replaced(self, adapter: AdapterId, host: HostAdapter) -> None:
        """Its folder has other content than was offered."""
        ...

    def lost(self, adapter: AdapterId, *, passing: bool) -> None:
        """It could not be brought to where it was wanted; `passing`: it may be, later."""
        ...


@dataclass(slots=True)
class _Read:
    begun_at: float
    slot: int | None  # None: fetched ahead, for host memory only


class Tiers:
    """`post` runs a function on the engine thread."""

    def __init__(
        self,
        *,
        cache: AdapterCache,
        runner: Runner,
        keeper: Keeper,
        post: Callable[[Callable[[], None]], None],
        readers: ThreadPoolExecutor,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._keeper = keeper
        self._post = post
        self._readers = readers
        self._metrics = metrics
        self._clock = clock
        self._copies: dict[Version, HostAdapter] = {}
        self._reading: dict[Version, _Read] = {}
        self._ahead: dict[Version, None] = {}  # to be fetched, in order

    def carry_out(self) -> None:
        """Do what the cache wants until it wants nothing more now."""
        while commands := self._cache.poll(self._clock()):
            for command in commands:
                self._do(command)

    def fetch(self, version: Version) -> None:
        """Bring a copy to host memory ahead of its use; one that is there counts as used now."""
        if version in self._copies:
            self._cache.read(*version)
        else:
            self._ahead[version] = None
            self._fetch_next()

    def keep(self, version: Version, host: HostAdapter) -> None:
        """A copy that was read."""
        self._copies[version] = host
        self._cache.read(*version)

    def _do(self, command: Command) -> None:
        match command:
            case Load(adapter, digest, slot, Tier.HOST):
                host, begun_at = self._copies[adapter, digest], self._clock()
                self._fill((adapter, digest), slot, host, Tier.HOST, begun_at)
            case Load(adapter, digest, slot):
                self._read((adapter, digest), slot)
            case Evict(_, slot):
                self._runner.clear(slot)
                self._metrics.evicted(Tier.GPU)
            case EvictHost(adapter, digest):
                if self._copies.pop((adapter, digest), None) is not None:
                    self._metrics.evicted(Tier.HOST)
            case _:
                assert_never(command)

    def _fetch_next(self) -> None:
        ahead = any(read.slot is None for read in self._reading.values())
        while self._ahead and not ahead:
            version = next(iter(self._ahead))
            del self._ahead[version]
            if version not in self._copies and version not in self._reading:
                self._read(version, None)
                return

    def _read(self, version: Version, slot: int | None) -> None:
        under_way = self._reading.get(version)
        if under_way is None:
            self._reading[version] = _Read(self._clock(), slot)
            self._readers.submit(self._read_one, version)
        else:  # it was being fetched ahead: now somebody waits for it
            under_way.slot = slot

    def _read_one(self, version: Version) -> None:
        """On a reader thread."""
        try:
            host = self._keeper.read(version[0])
        except Exception as error:  # any fault is this adapter's, never the engine's
            fault = error
            self._post(lambda: self._not_read(version, fault))
        else:
            self._post(lambda: self._arrived(version, host))

    def _arrived(self, version: Version, host: HostAdapter) -> None:
        adapter, digest = version
        if host.digest != digest:
            self._keeper.replaced(adapter, host)
            self.keep((adapter, host.digest), host)
            fault = BadAdapter("replaced", "its folder has other content by now")
            return self._not_read(version, fault)
        read = self._reading.pop(version)
        self.keep(version, host)
        if read.slot is not None:
            self._fill(version, read.slot, host, Tier.DISK, read.begun_at)
        self._fetch_next()
        return None

    def _not_read(self, version: Version, fault: Exception) -> None:
        read = self._reading.pop(version)
        _log.warning("adapter not read", extra={"adapter": version[0], "reason": _reason(fault)})
        if read.slot is not None:
            self._failed(version, read.slot, fault)
        self._fetch_next()

    def _failed(self, version: Version, slot: int, fault: Exception) -> None:
        self._metrics.load_failed()
        self._cache.load_failed(*version, slot, _reason(fault))
        passing = not isinstance(fault, BadAdapter) or fault.code in _PASSING
        self._keeper.lost(version[0], passing=passing)

    def _fill(
        self, version: Version, slot: int, host: HostAdapter, tier: Tier, begun_at: float
    ) -> None:
        try:
            self._runner.load(slot, host)
        except Exception as error:
            _log.exception("adapter not loaded", extra={"adapter": version[0]})
            self._failed(version, slot, error)
        else:
            self._metrics.loaded(tier, self._clock() - begun_at)
            self._cache.loaded(*version, slot)


def _reason(error: Exception) -> str:
    return str(error) or repr(error)
