"""AdapterView: what can be asked about adapters, slots and tiers. Asking changes nothing."""

from __future__ import annotations

from replica.core.catalogue import Catalogue, Known
from replica.core.host_tier import HostTier, Version
from replica.core.slot_table import Slot, SlotTable
from replica.core.step import BASE_SLOT
from replica.core.waiters import Waiters
from shared.ids import AdapterId
from shared.messages import AdapterState, AdapterStatus, Tier


class AdapterView:
    """Slots are 0 .. slots - 1."""

    def __init__(self, *, catalogue: Catalogue, slots: SlotTable, host: HostTier) -> None:
        self._catalogue = catalogue
        self._slots = slots
        self._host = host
        self._unplaced: tuple[tuple[AdapterId, float], ...] = ()
        self._states: tuple[AdapterState, ...] | None = None  # None: something has changed since

    def refusal(self, adapter: AdapterId) -> str | None:
        """Why a new sequence of this adapter can never run here; None when it can."""
        return self._catalogue.refusal(adapter)

    @property
    def unplaced(self) -> tuple[tuple[AdapterId, float], ...]:
        """Adapters that found no slot at the last poll, and since when; longest first."""
        return self._unplaced

    def unplaced_versions(self) -> list[Version]:
        versions = (self._catalogue.current(adapter) for adapter, _ in self._unplaced)
        return [version for version in versions if version is not None]

    @property
    def host_bytes(self) -> int:  # of copies in host memory, or on their way there
        return self._host.used_bytes

    @property
    def slots_used(self) -> int:  # by weights there or on their way, old versions included
        return self._slots.used

    @property
    def pages_used(self) -> int:  # likewise
        return self._slots.pages

    @property
    def host_used(self) -> int:  # copies in host memory, or on their way there
        return len(self._host)

    def slot_of(self, adapter: AdapterId) -> int | None:
        """Where a new sequence of this adapter would run, if it is resident."""
        slot = self._resident(adapter)
        return None if slot is None else slot.index

    def tier_of(self, adapter: AdapterId) -> Tier:
        """Where it is for a new sequence; one on its way to a slot is where it comes from."""
        version = self._catalogue.current(adapter)
        slot = None if version is None else self._slots.find(version)
        if slot is not None:
            return slot.tier if slot.loading else Tier.GPU
        return Tier.HOST if version is not None and version in self._host else Tier.DISK

    def slot_held(self, seq_id: str) -> int | None:
        slot = self._slots.held_by(seq_id)
        return None if slot is None else slot.index

    def digest_in(self, slot: int) -> str:
        """The version whose weights are in the slot; "" when none are, and for the base's slot."""
        if slot == BASE_SLOT:
            return ""
        held = self._slots[slot]
        return "" if held.loading or held.version is None else held.version[1]

    def pages_in(self, slot: int) -> tuple[int, ...]:
        """Those of what is in the slot, or on its way there."""
        return self._slots[slot].pages

    def holdings(self) -> list[tuple[int, ...]]:
        """The pages of each slot."""
        return [slot.pages for slot in self._slots]

    def drainable(self) -> tuple[int, ...]:
        """Slots that become free once nobody holds them: resident, their adapter not pinned."""
        return tuple(slot.index for slot in self._slots if slot.resident and self._spare(slot))

    def states(self) -> tuple[AdapterState, ...]:
        """Every adapter that a new sequence may name, or may not and why; by name."""
        if self._states is None:
            self._states = tuple(self._state(name, known) for name, known in self._catalogue)
        return self._states

    def check_versions(self, waiters: Waiters) -> None:
        """Everything in slots and host memory is somebody's."""
        loading = {slot.version for slot in self._slots if slot.loading}
        for slot in self._slots:
            assert not slot.idle or self._is_current(slot), "an old version that nobody holds stays"
            for seq in slot.holders:
                assert seq not in waiters, f"{seq!r} waits for what it holds"
        for version in self._host.versions():
            busy = self._host.is_busy(version)
            assert busy == (version in loading), f"{version}: busy is not loading"
            assert busy or self._catalogue.is_current(version), f"{version}: nobody will use it"

    def is_current(self, version: Version) -> bool:
        return self._catalogue.is_current(version)

    def _resident(self, adapter: AdapterId) -> Slot | None:
        version = self._catalogue.current(adapter)
        slot = None if version is None else self._slots.find(version)
        return None if slot is None or slot.loading else slot

    def _is_current(self, slot: Slot) -> bool:
        return slot.version is not None and self._catalogue.is_current(slot.version)

    def _spare(self, slot: Slot) -> bool:
        return slot.version is None or not self._catalogue.is_pinned(slot.version)

    def _state(self, adapter: AdapterId, known: Known) -> AdapterState:
        version: Version = (adapter, known.digest)
        slot = self._slots.find(version)
        tier, status = Tier.HOST if version in self._host else Tier.DISK, AdapterStatus.READY
        if known.failed:
            status, tier = AdapterStatus.FAILED, Tier.DISK
        elif slot is not None:
            tier = slot.tier if slot.loading else Tier.GPU
            status = AdapterStatus.LOADING if slot.loading else AdapterStatus.READY
        return AdapterState(
            adapter=adapter,
            digest=known.digest,
            tier=tier,
            status=status,
            rank=known.rank,
            size_bytes=known.size_bytes,
            pinned=known.pinned,
            running=0 if slot is None else len(slot.holders),
            reason=known.reason,
        )
