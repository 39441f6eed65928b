"""Pages: one pool of equal pages, and the table of those that one sequence holds.

Law: free and used pages partition `range(pages)`; a page is in at most one table; what a table
holds covers `len(table) * page_tokens` tokens; after every sequence has ended all pages are free.
Allocation is all or nothing, so a caller that is told no holds nothing it must give back.

Freed pages are handed out again last in, first out: the ones that were touched last are the ones
most likely still in a cache.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Page ids only; the memory behind them is the engine's."""

    def __init__(self, *, pages: int, page_tokens: int) -> None:
        if pages < 1 or page_tokens < 1:
            raise ValueError(f"a pool needs pages and tokens in them: {pages=}, {page_tokens=}")
        self.pages = pages
        self.page_tokens = page_tokens
        self._free = list(range(pages - 1, -1, -1))
        self._used = bytearray(pages)

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def capacity_tokens(self) -> int:
        return self.pages * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def allocate(self, n: int) -> list[int] | None:
        """n pages, or None and nothing taken."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        taken = self._free[cut:][::-1]
        del self._free[cut:]
        for page in taken:
            self._used[page] = 1
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Raises ValueError, having freed none, when one of them is not in use."""
        returned = list(pages)
        if len(set(returned)) != len(returned) or not all(map(self._is_used, returned)):
            raise ValueError(f"freed twice, or never allocated: {sorted(returned)}")
        for page in returned:
            self._used[page] = 0
        self._free.extend(reversed(returned))

    def check(self) -> None:
        free = set(self._free)
        used = {page for page in range(self.pages) if self._used[page]}
        assert len(free) == len(self._free), "a page is free twice"
        assert free.isdisjoint(used), f"free and used: {sorted(free & used)}"
        assert free | used == set(range(self.pages)), "a page is neither free nor used"

    def _is_used(self, page: int) -> bool:
        return 0 <= page < self.pages and self._used[page] == 1


class BlockTable:
    """The pages of one sequence, in the order of its tokens."""

    __slots__ = ("_frozen", "pages")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self._frozen: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.pages)

    def grow_to(self, tokens: int, pool: PagePool) -> bool:
        """Cover `tokens`; False, and unchanged, when the pool cannot."""
        missing = pool.pages_for(tokens) - len(self.pages)
        if missing <= 0:
            return True
        taken = pool.allocate(missing)
        if taken is None:
            return False
        self.pages.extend(taken)
        self._frozen = None
        return True

    def release(self, pool: PagePool) -> None:
        """Give everything back; harmless when repeated."""
        pages, self.pages, self._frozen = self.pages, [], None
        pool.free(pages)

    def frozen(self) -> tuple[int, ...]:
        """The pages as a value. Built once a growth, since every step of a sequence asks."""
        if self._frozen is None:
            self._frozen = tuple(self.pages)
        return self._frozen
