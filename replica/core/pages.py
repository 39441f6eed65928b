"""Pages: one pool of equal pages for keys, values and adapters, and the table of a sequence.

A page is held by any number of tables, or by one adapter, or it is cached: held by nobody, but full
of keys that may be wanted again (`prefix.py` says how they are named), or it is free. Laws:

- Held, cached and free pages partition `range(pages)`; a page that more than one table holds, or
  that is cached, is full and named, and nobody writes to it.
- A name is of one page. What a table holds covers `len(table) * page_tokens` tokens.
- A cached page is as good as a free one: `available` counts both, and an allocation takes free
  pages first, then cached ones, the least recently held first. After every sequence has ended and
  every adapter has left, all pages are available.
- Allocation is all or nothing, so a caller that is told no holds nothing it must give back.

Freed pages are handed out again last in, first out: the ones that were touched last are the ones
most likely still in a processor's cache. Who asks for cold ones gets those that were freed first:
a step under way names none of them, most likely, so a copy into them need not wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class PagePool:
    """Page ids only; the memory behind them is the engine's."""

    def __init__(self, *, pages: int, page_tokens: int) -> None:
        if pages < 1 or page_tokens < 1:
            raise ValueError(f"a pool needs pages and tokens in them: {pages=}, {page_tokens=}")
        self.pages = pages
        self.page_tokens = page_tokens
        self.headroom = 0  # pages that running sequences may want next: starts and loads leave them
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._cached: dict[int, None] = {}  # least recently held first
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """What an allocation can get."""
        return len(self._free) + len(self._cached)

    @property
    def spare(self) -> int:
        """What is left of `available` beyond the headroom; negative when it does not suffice."""
        return self.available - self.headroom

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        return self.pages * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def allocate(self, n: int, *, cold: bool = False) -> list[int] | None:
        """n pages that nobody else holds, or None and nothing taken."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self.available:
            return None
        while len(self._free) < n:
            page = next(iter(self._cached))
            del self._cached[page]
            self._forget(page)
            self._free.append(page)
        last = slice(0, n) if cold else slice(len(self._free) - n, None)
        taken = self._free[last] if cold else self._free[last][::-1]
        del self._free[last]
        for page in taken:
            self._holders[page] = 1
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """One holder less for each. Raises ValueError, having freed none, when one has no holder.

        Of pages freed together the last is the first to be forgotten: without it the earlier ones
        are still of use, the other way round they are not.
        """
        returned = list(pages)
        if len(set(returned)) != len(returned) or not all(map(self._is_held, returned)):
            raise ValueError(f"freed twice, or never allocated: {sorted(returned)}")
        for page in reversed(returned):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._names:
                self._cached[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, name: bytes) -> None:
        """The page is full, and this names what is in it. The first page of a name keeps it."""
        if name not in self._named and page not in self._names:
            self._named[name], self._names[page] = page, name

    def hold(self, names: Sequence[bytes]) -> list[int]:
        """The pages of the longest run of known names, each with one holder more."""
        found: list[int] = []
        for name in names:
            page = self._named.get(name)
            if page is None:
                break
            self._cached.pop(page, None)  # it is there while nobody holds it
            self._holders[page] += 1
            found.append(page)
        return found

    def known(self, names: Sequence[bytes]) -> int:
        """How many pages `hold` would find."""
        return next((at for at, name in enumerate(names) if name not in self._named), len(names))

    def distrust(self, pages: Iterable[int]) -> None:
        """What is in these held pages may be wrong: nobody is to find it by name any more."""
        for page in pages:
            assert self._is_held(page), f"nobody holds page {page}"
            self._forget(page)

    def check(self, holdings: Iterable[Iterable[int]] | None = None) -> None:
        """`holdings`, where given: all the pages of each holder."""
        free, cached = set(self._free), set(self._cached)
        held = {page for page in range(self.pages) if self._holders[page]}
        assert min(self._holders) >= 0, "a page has lost more holders than it had"
        assert len(free) == len(self._free), "a page is free twice"
        every = sorted([*free, *held, *cached])
        assert every == list(range(self.pages)), "a page is lost, or two things at once"
        assert {page: name for name, page in self._named.items()} == self._names
        assert cached <= self._names.keys(), "cached, yet nobody could find it"
        assert free.isdisjoint(self._names), "free, yet it can be found"
        if holdings is not None:
            holders = Counter(page for pages in holdings for page in pages)
            assert [holders[page] for page in range(self.pages)] == self._holders, (
                "a holder is lost"
            )

    def _is_held(self, page: int) -> bool:
        return 0 <= page < self.pages and self._holders[page] > 0

    def _forget(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]


class BlockTable:
    """The pages of one sequence, in the order of its tokens."""

    __slots__ = ("_frozen", "pages")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self._frozen: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.pages)

    def share(self, names: Sequence[bytes], pool: PagePool) -> int:
        """Begin with pages that others filled; how many there are. Only for an empty table."""
        assert not self.pages, "shared pages come first"
        self.pages, self._frozen = pool.hold(names), None
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
