"""Room: who gives up pages for whom. The order of value is stated here and nowhere else.

Pages that nobody holds go first: free ones, then cached keys (`pages.py`). A cached page may spare
some later prompt a few tokens of work; an adapter that leaves costs its next request a load. Then

    1. idle adapters that nobody waits for       the least recently used first
    2. idle adapters that somebody waits for     the least recently used first
    3. the newest running sequence               preemption, by the scheduler

A running sequence that grows may take from all three. One that starts may take from 1 and 2, and
leaves a page for each that runs: the pool's headroom. A load leaves the headroom too, and may take
from 1, and from 2 where those who wait are younger than who waits for it. Adapters that are held,
loading or pinned give up nothing; all together they have at most `pages_max`, so that preemption
always makes room for the oldest sequence, however long it grows. Nobody leaves in vain: either all
that is needed can be had, or nothing is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from replica.core.pages import PagePool
from replica.core.slot_table import Slot, SlotTable


class Fit(NamedTuple):
    """Whether a load would find what it needs."""

    slot: bool  # a slot, and pages among the adapters'
    pages: bool  # that many in the pool

    def __bool__(self) -> bool:
        return self.slot and self.pages


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a load would find once all idle adapters had left that may. One look at the slots
    serves many questions."""

    gone: frozenset[int]  # their slots
    slot: bool  # there is one then
    of_slot: tuple[int, ...]  # pages, by slot
    left: int  # of the adapters' pages
    spare: int  # of the pool's

    def fits(self, pages: int, drained: Collection[int] = ()) -> Fit:
        """Whether a load of `pages` could begin if these slots had been left too."""
        more = [slot for slot in drained if slot not in self.gone]
        freed = sum(self.of_slot[slot] for slot in more)
        slot = (self.slot or bool(more)) and self.left + freed >= pages
        return Fit(slot, self.spare + freed >= pages)


class Room:
    def __init__(
        self, *, slots: SlotTable, pool: PagePool, pages_max: int, spare: Callable[[Slot], bool]
    ) -> None:
        """`spare`: whether what is in a slot may leave once nobody holds it."""
        self.pages_max = pages_max
        self._slots = slots
        self._pool = pool
        self._spare = spare

    def for_load(self, pages: int, promised: Collection[int]) -> list[Slot] | None:
        """Who has to leave so that a load can begin; None when all who may are not enough."""
        leaving: list[Slot] = []
        idle = [slot for slot in self._idle() if slot.index not in promised]
        while not self.fits(pages, leaving):
            if not idle:
                return None
            leaving.append(idle.pop(0))
        return leaving

    def for_sequence(
        self, pages: int, awaited: Collection[int], keep: int | None
    ) -> list[Slot] | None:
        """Who has to leave so that the pool has `pages`; None when all who may are not enough."""
        leaving: list[Slot] = []
        missing = pages - self._pool.available
        idle = [slot for slot in self._idle() if slot.index != keep]
        idle.sort(key=lambda slot: slot.index in awaited)
        while missing > 0:
            if not idle:
                return None
            leaving.append(idle.pop(0))
            missing -= len(leaving[-1].pages)
        return leaving

    def fits(self, pages: int, leaving: Collection[Slot]) -> Fit:
        """Whether a load of `pages` could begin if these had left."""
        freed = sum(len(slot.pages) for slot in leaving)
        within = self._slots.pages - freed + pages <= self.pages_max
        slot = within and (bool(leaving) or self._slots.empty() is not None)
        return Fit(slot, self._pool.spare + freed >= pages)

    def prospect(self, promised: Collection[int]) -> Prospect:
        """With all gone that are idle and not promised."""
        gone = frozenset(slot.index for slot in self._idle()).difference(promised)
        of_slot = tuple(len(slot.pages) for slot in self._slots)
        freed = sum(of_slot[slot] for slot in gone)
        return Prospect(
            gone=gone,
            slot=bool(gone) or self._slots.empty() is not None,
            of_slot=of_slot,
            left=self.pages_max - self._slots.pages + freed,
            spare=self._pool.spare + freed,
        )

    def check(self) -> None:
        assert self._slots.pages <= self.pages_max, "adapters have pages that are not theirs"

    def _idle(self) -> list[Slot]:
        return [slot for slot in self._slots.idle() if self._spare(slot)]
