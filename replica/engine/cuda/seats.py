"""Seats: rows of the block tables on the device, one a running sequence, kept up to date by change.

Law: after the changes of a step are applied, row `seat` of the tables begins with the pages of the
step's row that has that seat. A sequence keeps its seat while it is in most steps, so that a step
changes only what is new: a page every `page_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replica.core.step import Row


class Seats:
    def __init__(self, *, seats: int, pages: int) -> None:
        """`pages` a sequence may have. `seats` is at least the rows of a step; twice as many spare
        most of the looking for seats that are not used any more."""
        self.seats, self.pages = seats, pages
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
                same = _common(known[seat], table)
                places += range(seat * self.pages + same, seat * self.pages + len(table))
                pages += table[same:]
                known[seat] = table
        return seats, places, pages

    def _reclaim(self, needed: Iterable[str]) -> None:
        kept = {seq: self._of[seq] for seq in needed if seq in self._of}
        self._of = kept
        held = set(kept.values())
        self._free = [seat for seat in range(self.seats - 1, -1, -1) if seat not in held]


def _common(old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """How many leading pages are the same; mostly all of the old ones, or none."""
    if new[: len(old)] == old:
        return len(old)
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(new))
