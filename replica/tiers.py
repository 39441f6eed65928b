"""Tiers: carry out what the adapter cache decides. Store or disk to host on threads of their own.

Laws: everything but the read itself happens on the engine thread, so other rows go on decoding
while a disk is slow; one version is read once at a time, however many want it; a load that was
asked for is answered once, by `loaded`, `load_failed` or `postpone`, and a fetch by `read` or
`fetch_failed`; weights enter a slot only if their digest is the one that was asked for, and stay
only if their canary lives; what comes from another machine has its own threads, and never stands
before what comes from the disk; copies fetched ahead are read one after another, so that they never
stand before a load that a request waits for; names with one content share one copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, Protocol, assert_never

from replica.canary import Canary
from replica.core.adapter_cache import AdapterCache
from replica.core.commands import Command, Evict, EvictHost, Fetch, Load
from replica.core.host_tier import Version
from replica.core.sequence import AdapterLoad
from replica.engine.adapter_store import BadAdapter, HostAdapter
from replica.engine.flight import StepRunner
from replica.metrics import Metrics
from replica.moves import Filling, Read
from replica.rates import Rates
from replica.source import PASSING
from shared.clock import Clock
from shared.ids import AdapterId
from shared.messages import Tier

_log = logging.getLogger(__name__)

_DISK_BYTES_PER_S: Final = 1e9
"""Whatever the disk: only the ratio to a store's matters, and noise would tell equals apart."""
_FAR_MAX: Final = 100.0

_AHEAD_MAX: Final = 4
"""Adapters that wait for a slot and are read ahead of it."""


class Keeper(Protocol):
    """Who knows where adapters are read from, and hears what reading found."""

    def read(self, adapter: AdapterId) -> HostAdapter:
        """On a reader thread; may block, and raises BadAdapter."""
        ...

    def at_hand(self, adapter: AdapterId) -> bool:
        """Whether reading it needs this machine only."""
        ...

    def replaced(self, adapter: AdapterId, host: HostAdapter) -> None:
        """Its folder has other content than was offered."""
        ...

    def tried(self, version: Version, fault: Exception | None) -> None:
        """It has come into a slot, or never will."""
        ...

    def lost(self, adapter: AdapterId, *, passing: bool) -> None:
        """It could not be brought to where it was wanted; `passing`: it may be, later."""
        ...


class Tiers:
    """`post` runs a function on the engine thread; `downloads` are for what is far away."""

    def __init__(
        self,
        *,
        cache: AdapterCache,
        runner: StepRunner,
        canary: Canary,
        keeper: Keeper,
        post: Callable[[Callable[[], None]], None],
        readers: ThreadPoolExecutor,
        downloads: ThreadPoolExecutor,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._canary = canary
        self._keeper = keeper
        self._post = post
        self._pools = {False: readers, True: downloads}
        self._metrics = metrics
        self._clock = clock
        self._copies: dict[Version, HostAdapter] = {}
        self._reading: dict[Version, Read] = {}
        self._ahead: dict[Version, None] = {}  # to be read ahead, in order
        self._foreseen: set[Version] = set()  # have no slot yet, and were read ahead
        self._filling: list[Filling] = []
        self.loads: dict[int, AdapterLoad] = {}
        """Of each slot, the load that filled it last."""
        self.rates = Rates()

    @property
    def loading(self) -> bool:
        """Copies to the device are under way."""
        return bool(self._filling)

    def carry_out(self) -> None:
        """Say what has arrived, then `begin`."""
        for filling in [each for each in self._filling if each.arrival and each.arrival.query()]:
            self._filling.remove(filling)
            self._filled(filling)
        self.begin()

    def begin(self) -> None:
        """Do what the cache wants until it wants nothing more now. On a GPU no load ends by it."""
        while commands := self._cache.poll(self._clock()):
            for command in commands:
                self._do(command)
        unplaced = self._cache.unplaced_versions()
        self._foreseen.intersection_update(unplaced)
        for version in unplaced[:_AHEAD_MAX]:
            if version not in self._foreseen:  # once: when memory is short it may be let go again
                self._foreseen.add(version)
                self.fetch(version)

    def fetch(self, version: Version) -> None:
        """Bring a copy to host memory ahead of its use; one that is there counts as used now."""
        if version in self._copies:
            self._cache.read(*version)
        elif version not in self._reading and version not in self._ahead:
            self._metrics.prefetched(Tier.HOST)
            self._ahead[version] = None
            self._read_ahead()

    def keep(self, version: Version, host: HostAdapter, reload_s: float | None = None) -> None:
        """A copy that was read (from the disk, if `reload_s` is None): one in memory a content."""
        twin = self._twin(version[1])
        self._copies[version] = host if twin is None else replace(twin, adapter=version[0])
        from_disk_s = host.size_bytes / _DISK_BYTES_PER_S
        self._cache.read(*version, from_disk_s if reload_s is None else reload_s)

    def _twin(self, digest: str) -> HostAdapter | None:
        return next((host for host in self._copies.values() if host.digest == digest), None)

    def _do(self, command: Command) -> None:
        match command:
            case Load(adapter, digest, slot, tier):
                version = (adapter, digest)
                if tier is Tier.DISK and (twin := self._twin(digest)) is not None:
                    self.keep(version, twin)
                    tier = Tier.HOST
                host = self._copies.get(version)
                if host is not None:
                    self._fill(version, slot, host, tier, self._clock())
                elif self._keeper.at_hand(adapter):
                    self._read(version, slot=slot)
                else:
                    self._cache.postpone(adapter, digest, slot)
            case Fetch(adapter, digest):
                self._read((adapter, digest), wanted=True)
            case Evict(_, slot):
                self._runner.clear(slot)
                self._metrics.evicted(Tier.GPU)
            case EvictHost(adapter, digest):
                if self._copies.pop((adapter, digest), None) is not None:
                    self._metrics.evicted(Tier.HOST)
            case _:
                assert_never(command)

    def _read_ahead(self) -> None:
        """One from the disk and one from afar at a time."""
        busy = {read.remote for read in self._reading.values() if read.ahead}
        for version in list(self._ahead):
            if version in self._copies or version in self._reading:
                del self._ahead[version]
            elif (remote := not self._keeper.at_hand(version[0])) not in busy:
                del self._ahead[version]
                busy.add(remote)
                self._read(version)

    def _read(self, version: Version, *, slot: int | None = None, wanted: bool = False) -> None:
        read = self._reading.get(version)
        if read is None:
            remote = not self._keeper.at_hand(version[0])
            read = self._reading[version] = Read(remote, self._clock())
            self._pools[remote].submit(self._read_one, version)
        read.slot = read.slot if slot is None else slot
        read.wanted = read.wanted or wanted  # if it was read ahead, now somebody waits for it

    def _read_one(self, version: Version) -> None:
        """On a thread of either pool."""
        begun_at = self._clock()
        try:
            host = self._keeper.read(version[0])
        except Exception as error:  # any fault is this adapter's, never the engine's
            self._post(partial(self._not_read, version, error))
        else:
            self._post(partial(self._arrived, version, host, self._clock() - begun_at))

    def _arrived(self, version: Version, host: HostAdapter, seconds: float) -> None:
        adapter, digest = version
        read = self._reading[version]
        (self.rates.fetch if read.remote else self.rates.read).observe(host.size_bytes, seconds)
        reload_s = self._reload_s(read, host)
        if host.digest != digest:
            self._keeper.replaced(adapter, host)
            self.keep((adapter, host.digest), host, reload_s)
            self._not_read(version, BadAdapter("replaced", "its folder has other content by now"))
            return
        del self._reading[version]
        self.keep(version, host, reload_s)
        if read.slot is not None:
            self._fill(version, read.slot, self._copies[version], Tier.DISK, read.begun_at)
        self._read_ahead()

    def _reload_s(self, read: Read, host: HostAdapter) -> float:
        """What it would cost to read this again."""
        nearer, farther = self.rates.read.bytes_per_s, self.rates.fetch.bytes_per_s
        far = nearer / farther if read.remote and nearer and farther else 1.0
        return host.size_bytes / _DISK_BYTES_PER_S * min(max(far, 1.0), _FAR_MAX)

    def _not_read(self, version: Version, fault: Exception) -> None:
        read = self._reading.pop(version)
        _log.warning("adapter not read", extra={"adapter": version[0], "reason": _reason(fault)})
        if read.slot is not None:
            self._cache.load_failed(*version, read.slot, _reason(fault))
        elif read.wanted:
            self._cache.fetch_failed(*version, _reason(fault))
        if not read.ahead:
            self._failed(version, fault)
        self._read_ahead()

    def _failed(self, version: Version, fault: Exception) -> None:
        self._metrics.load_failed()
        passing = not isinstance(fault, BadAdapter) or fault.code in PASSING
        self._keeper.tried(version, fault)
        self._keeper.lost(version[0], passing=passing)

    def _fill(
        self, version: Version, slot: int, host: HostAdapter, tier: Tier, begun_at: float
    ) -> None:
        copied_at = self._clock()
        try:
            arrival = self._runner.load(slot, host, self._cache.pages_in(slot))
        except Exception as error:
            self._not_filled(version, slot, error)
            return
        filling = Filling(arrival, version, slot, tier, begun_at, copied_at, host.size_bytes)
        if arrival is None:
            self._filled(filling)
        else:
            self._filling.append(filling)

    def _filled(self, filling: Filling) -> None:
        """Its weights are in their pages; what they compute is tried before anybody is answered."""
        now, version, slot = self._clock(), filling.version, filling.slot
        self.rates.copy.observe(filling.size_bytes, now - filling.copied_at)
        try:
            self._canary.fly(slot, version[1])
        except Exception as error:
            self._not_filled(version, slot, error)
            return
        now = self._clock()
        self.loads[slot] = AdapterLoad(version[1], filling.tier, filling.begun_at, now)
        self._metrics.loaded(filling.tier, now - filling.begun_at)
        self._cache.loaded(*version, slot)
        self._keeper.tried(version, None)

    def _not_filled(self, version: Version, slot: int, fault: Exception) -> None:
        expected = isinstance(fault, BadAdapter)
        _log.log(
            logging.WARNING if expected else logging.ERROR,
            "adapter not loaded",
            extra={"adapter": version[0], "reason": _reason(fault)},
            exc_info=None if expected else fault,
        )
        self._cache.load_failed(*version, slot, _reason(fault))
        self._failed(version, fault)


def _reason(error: Exception) -> str:
    return str(error) or repr(error)
