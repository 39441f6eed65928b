"""Seats: rows of the block tables on the device, one a running sequence, kept up to date by change.

Law: after the changes of a step are applied, row `seat` of the tables begins with the pages of the
step's row that has that seat; where one is RELEASED stands the zero page, as in padding, so that no
place names a page that may be another sequence's. A sequence keeps its seat while it is in most
steps, so that a step changes only what is new: a page every `page_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replica.core.pages import RELEASED
from replica.core.step import Row


class Seats:
    def __init__(self, *, seats: int, pages: int, zero_page: int) -> None:
        """`pages` a sequence may have. `seats` is at least the rows of a step; twice as many spare
        most of the looking for seats that are not used any more."""
        self.seats, self.pages = seats, pages
        self._zero_page = zero_page
        self._of: dict[str, int] = {}
        self._free = list(range(seats - 1, -1, -1))
        self._known: list[tuple[int, ...]] = [()] * seats

    def take(self, rows: Sequence[Row]) -> tuple[list[int], list[int], list[int]]:
        """The rows' seats; and what changed in the tables: places in the flat table, and pages."""
        if len(self._free) < len(rows):
            self._reclaim({row.seq for row in rows})
        seats: list[int] = []
        places: list[int] = []
        pages: list[int] = []
        known = self._known
        for row in rows:
            seat = self._of.get(row.seq)
            if seat is None:
                seat = self._of[row.seq] = self._free.pop()
            seats.append(seat)
            table = row.pages
            if known[seat] is not table:
                first = seat * self.pages
                for begin, end in _changes(known[seat], table):
                    places += range(first + begin, first + end)
                    pages += (self._zero_page if p == RELEASED else p for p in table[begin:end])
                known[seat] = table
        return seats, places, pages

    def _reclaim(self, needed: Iterable[str]) -> None:
        kept = {seq: self._of[seq] for seq in needed if seq in self._of}
        self._of = kept
        held = set(kept.values())
        self._free = [seat for seat in range(self.seats - 1, -1, -1) if seat not in held]


def _changes(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """From where to where they differ: mostly in pages that are new, and in some that the sequence
    has passed since; or altogether."""
    before, passed = old.count(RELEASED), new.count(RELEASED)
    if before <= passed <= len(old) and new[passed : len(old)] == old[passed:]:
        return (before, passed), (len(old), len(new))
    both = min(len(old), len(new))
    same = next((i for i in range(both) if old[i] != new[i]), both)
    return ((same, len(new)),)
