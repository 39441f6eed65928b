"""SlotTable: what is in each slot, in which pages, and which sequences hold it.

Law: a version is in at most one slot; only a slot with weights in it is held; a sequence holds at
most one slot, and lets it go once; an empty slot has no pages. Use is counted by ordinal, not by
clock: no two uses tie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from replica.core.host_tier import Version
from shared.messages import Tier


@dataclass(slots=True, eq=False)
class Slot:
    index: int
    version: Version | None = None
    loading: bool = False
    tier: Tier = Tier.DISK  # where its load comes from
    pages: tuple[int, ...] = ()  # of the pool, owned by what is in it
    holders: set[str] = field(default_factory=set)
    used: int = 0  # ordinal of its last use

    @property
    def resident(self) -> bool:
        return self.version is not None and not self.loading

    @property
    def idle(self) -> bool:
        return self.resident and not self.holders


class SlotTable:
    def __init__(self, *, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"an adapter cache needs at least one slot, not {slots}")
        self._slots = tuple(Slot(index) for index in range(slots))
        self._placed: dict[Version, Slot] = {}
        self._leases: dict[str, Slot] = {}
        self._ordinal = 0
        self.pages = 0  # that all slots own together

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def used(self) -> int:
        return len(self._placed)

    def find(self, version: Version) -> Slot | None:
        """Where it is, or is being loaded into."""
        return self._placed.get(version)

    def held_by(self, seq_id: str) -> Slot | None:
        return self._leases.get(seq_id)

    def hold(self, slot: Slot, seq_id: str) -> None:
        self._leases[seq_id] = slot
        slot.holders.add(seq_id)
        self._use(slot)

    def let_go(self, seq_id: str) -> Slot | None:
        """The slot that was held; None when none was."""
        slot = self._leases.pop(seq_id, None)
        if slot is not None:
            slot.holders.remove(seq_id)
            self._use(slot)
        return slot

    def begin(self, slot: Slot, version: Version, tier: Tier, pages: tuple[int, ...]) -> None:
        """An empty slot starts to receive a version."""
        assert slot.version is None, f"slot {slot.index} is not empty"
        slot.version, slot.loading, slot.tier, slot.pages = version, True, tier, pages
        self.pages += len(pages)
        self._placed[version] = slot

    def settle(self, slot: Slot) -> None:
        """Its load has ended well."""
        slot.loading = False
        self._use(slot)

    def vacate(self, slot: Slot) -> tuple[int, ...]:
        """The pages that it owned."""
        assert slot.version is not None, f"slot {slot.index} is empty"
        assert not slot.holders, f"slot {slot.index} is held"
        del self._placed[slot.version]
        pages, slot.pages = slot.pages, ()
        slot.version, slot.loading = None, False
        self.pages -= len(pages)
        return pages

    def empty(self) -> Slot | None:
        return next((slot for slot in self._slots if slot.version is None), None)

    def idle(self) -> list[Slot]:
        """Resident and held by nobody; the least recently used first."""
        return sorted((slot for slot in self._slots if slot.idle), key=lambda slot: slot.used)

    def check(self) -> None:
        placed = {slot.version: slot for slot in self._slots if slot.version is not None}
        assert placed == self._placed, "a version has two slots, or a slot is not listed"
        held = {seq: slot for slot in self._slots for seq in slot.holders}
        assert held == self._leases, "a lease without its holder, or a holder without its lease"
        for slot in self._slots:
            assert slot.resident or not slot.holders, f"slot {slot.index} is held without weights"
            assert slot.version or not slot.pages, f"slot {slot.index} is empty and has pages"
        assert self.pages == sum(len(slot.pages) for slot in self._slots), "pages are miscounted"

    def _use(self, slot: Slot) -> None:
        self._ordinal += 1
        slot.used = self._ordinal
