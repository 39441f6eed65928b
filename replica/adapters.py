"""Adapters: all that the engine thread does about adapters, besides running them.

It joins three parts: the roster says which names are served from which folder, the cache decides
which of them are in slots and host memory, the tiers move the weights. Every method runs on the
engine thread between two steps, but `read`. When one returns, what it changed has been carried out
(a withdrawn adapter that nobody uses has left its slot and host memory) and `changed` was called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, assert_never

from replica.canary import Canary
from replica.core.adapter_cache import AdapterCache
from replica.core.host_tier import Version
from replica.core.sequence import AdapterLoad
from replica.engine.adapter_store import BadAdapter, HostAdapter
from replica.engine.flight import StepRunner
from replica.errors import BadAdapterRequest
from replica.metrics import Metrics
from replica.rates import Rates
from replica.roster import Fact, Offered, Refused, Roster, Withdrawn
from replica.source import Source
from replica.tiers import Tiers
from shared.clock import Clock
from shared.ids import AdapterId
from shared.messages import AdapterState, AdapterStatus, Tier

_log = logging.getLogger(__name__)

Trial = Future[Exception | None]
_AHEAD: Final = "ahead "
"""Begins the name of who wants an adapter in a slot before anybody asks for it."""

RETRY_S: Final = 10.0
"""An adapter that a disk kept from us is offered again after this long."""


class Adapters:
    def __init__(
        self,
        *,
        base_name: str,
        slots: int,
        cache: AdapterCache,
        runner: StepRunner,
        canary: Canary,
        source: Source,
        readers: ThreadPoolExecutor,
        downloads: ThreadPoolExecutor,
        post: Callable[[Callable[[], None]], None],
        changed: Callable[[], None],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        """`source` is read on `readers`, and on `downloads` what is not at hand."""
        self._slots = slots
        self._cache = cache
        self._runner = runner
        self._canary = canary
        self._source = source
        self._warming: set[AdapterId] = set()
        self._changed = changed
        self._metrics = metrics
        self._clock = clock
        self._roster = Roster(base_name=base_name)
        self._retry_at: dict[AdapterId, float] = {}
        self._trials: dict[Version, Trial] = {}
        self._tiers = Tiers(
            cache=cache,
            runner=runner,
            canary=canary,
            keeper=self,
            post=post,
            readers=readers,
            downloads=downloads,
            metrics=metrics,
            clock=clock,
        )

    @property
    def loading(self) -> bool:
        """Whether an adapter is being copied to the device: `carry_out` sees when it is there."""
        return self._tiers.loading

    def begin(self) -> None:
        """Have the loads begin that can, and nothing end."""
        self._tiers.begin()

    def carry_out(self) -> None:
        """What the scheduler's wishes and returned slots have brought about since."""
        self._tiers.carry_out()
        for name in [name for name in self._warming if self._arrived(name)]:
            self._warming.discard(name)
            self._cache.release(_AHEAD + name)

    def scanned(self, found: Mapping[AdapterId, Offered | Refused]) -> None:
        """What the store holds now."""
        now = self._clock()
        for name in [name for name, at in self._retry_at.items() if at <= now]:
            del self._retry_at[name]
            self._try_again(name)
        self._tell_cache(self._roster.scanned(found))
        self._settle()

    def check_load(self, name: AdapterId, folder: AdapterId, *, in_place: bool) -> None:
        """Raises BadAdapterRequest: known before the folder is read."""
        self._roster.check_load(name, folder, in_place=in_place)

    def load(
        self,
        name: AdapterId,
        folder: AdapterId,
        host: HostAdapter,
        *,
        in_place: bool,
        pinned: bool | None,
    ) -> Trial:
        """Serve what was read from `folder` as `name`. Raises BadAdapterRequest.

        The trial ends once it has been in a slot and its canary has lived, with None, or with what
        was wrong; it may have to wait for a slot.
        """
        self._roster.check_load(name, folder, in_place=in_place)
        content = self._content(folder, host)
        self._tell_cache(self._roster.load(name, folder, content))
        if self._cache.refusal(name) is not None:  # it failed before; what was read now is whole
            self._tell_cache(self._roster.again(name))
        self._tiers.keep((name, host.digest), host)
        self._settle()
        if pinned is not None:
            try:
                self.pin(name, pinned)
            except BadAdapterRequest:
                self.unload(name)
                raise
        return self._try((name, host.digest))

    def canary_of(self, state: AdapterState) -> str:
        """`passed`, `failed`, or `pending` until it comes into a slot. From any thread."""
        if state.status is AdapterStatus.FAILED:
            return "failed" if state.reason.startswith("canary_") else "pending"
        return "passed" if self._canary.has_passed(state.digest) else "pending"

    def load_of(self, adapter: AdapterId, digest: str) -> AdapterLoad | None:
        """How the version that is in a slot came there."""
        slot = self._cache.slot_of(adapter)
        load = None if slot is None else self._tiers.loads.get(slot)
        return load if load is not None and load.digest == digest else None

    @property
    def rates(self) -> Rates:
        return self._tiers.rates

    def _try(self, version: Version) -> Trial:
        trial: Trial = Future()
        if self._canary.has_passed(version[1]):
            trial.set_result(None)
            return trial
        earlier = self._trials.get(version)
        if earlier is not None:
            return earlier
        self._trials[version] = trial
        self._cache.want(version[0], _trial_name(version), self._clock())
        self._settle()
        if version in self._trials and self._cache.slot_of(version[0]) is not None:
            self.tried(version, None)  # it was in a slot already, untried for want of pages
        return trial

    def _end_trials(self) -> None:
        """Of versions that are no more: nobody will hear of them otherwise."""
        for version in list(self._trials):
            reason = self._cache.refusal(version[0])
            if reason is not None or not self._cache.is_current(version):
                self.tried(version, BadAdapter("withdrawn", reason or "it was replaced"))

    def unload(self, name: AdapterId) -> None:
        """Raises UnknownAdapter. Sequences that hold it finish on it; nobody else gets it."""
        self._tell_cache(self._roster.unload(name))
        self._settle()

    def pin(self, name: AdapterId, on: bool) -> None:
        """Raises BadAdapterRequest when no further slot may be pinned."""
        try:
            self._cache.pin(name, on)
        except ValueError as error:
            raise BadAdapterRequest(str(error), param="pinned", code="cannot_pin") from None
        self._settle()

    def prefetch(self, versions: list[Version]) -> None:
        """Bring copies to host memory, one after another; those there count as used now."""
        for version in versions:
            self._tiers.fetch(version)

    def warm(self, names: list[AdapterId]) -> None:
        """Bring them into slots while slots are free; none is emptied for it."""
        free = self._slots - self._cache.slots_used
        for name in names[: max(0, free)]:
            if not self._arrived(name):
                if name not in self._warming:
                    self._metrics.prefetched(Tier.GPU)
                self._warming.add(name)
                self._cache.want(name, _AHEAD + name, self._clock())
        self._settle()

    # --- for `Tiers`

    def read(self, adapter: AdapterId) -> HostAdapter:
        return self._source.read(self._roster.folder_of(adapter))

    def at_hand(self, adapter: AdapterId) -> bool:
        return self._source.at_hand(self._roster.folder_of(adapter))

    def tried(self, version: Version, fault: Exception | None) -> None:
        trial = self._trials.pop(version, None)
        if trial is not None:
            self._cache.release(_trial_name(version))
            if trial.set_running_or_notify_cancel():
                trial.set_result(fault)

    def replaced(self, adapter: AdapterId, host: HostAdapter) -> None:
        content = self._content(adapter, host)
        self._tell_cache(self._roster.replaced(adapter, content))

    def lost(self, adapter: AdapterId, *, passing: bool) -> None:
        if passing:
            self._retry_at[adapter] = self._clock() + RETRY_S
        self._changed()

    def _content(self, adapter: AdapterId, host: HostAdapter) -> Offered:
        pages = self._runner.pages_of(host)
        return Offered(adapter, host.digest, host.rank, host.size_bytes, pages)

    def _arrived(self, name: AdapterId) -> bool:
        """In a slot, or it never will be."""
        return self._cache.slot_of(name) is not None or self._cache.refusal(name) is not None

    def _try_again(self, name: AdapterId) -> None:
        pinned = any(state.adapter == name and state.pinned for state in self._cache.states())
        facts = self._roster.again(name)
        self._tell_cache(facts)
        if facts and pinned:
            self._cache.pin(name, True)

    def _tell_cache(self, facts: list[Fact]) -> None:
        for fact in facts:
            match fact:
                case Offered(name, digest, rank, size_bytes, pages):
                    self._cache.offer(name, digest, rank, size_bytes, pages)
                case Refused(name, reason):
                    _log.warning("adapter refused", extra={"adapter": name, "reason": reason})
                    self._cache.failed(name, reason)
                case Withdrawn(name):
                    self._cache.withdraw(name)
                case _:
                    assert_never(fact)

    def _settle(self) -> None:
        self._end_trials()
        self._tiers.carry_out()
        self._changed()


def _trial_name(version: Version) -> str:
    """The sequence that waits in the line of adapters, and never runs."""
    return f"canary {version[0]} {version[1]}"
