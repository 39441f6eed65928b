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
- Where the base has a `window` of w tokens, a token at position p sees those at p - w < j <= p. So
  a sequence whose next token stands at p has no use for the pages that end at or before
  p + 1 - w: it gives them back, they are cached or free as any, and RELEASED stands in their
  places. It holds pages for the window, for the tokens of one step and one page more, however
  long it runs. The window must be that of every layer: a base in which some layers see everything
  (Qwen2's `max_window_layers`) has none here, and keeps all.
- What is found by name is as much of a beginning as there is, and of its pages those that the next
  token sees: a name says all that was before, so earlier pages may be gone.

Freed pages are handed out again last in, first out: the ones that were touched last are the ones
most likely still in a processor's cache. Who asks for cold ones gets those that were freed first:
a step under way names none of them, most likely, so a copy into them need not wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

RELEASED: Final = -1
"""In a block table, where a page was given back. No kernel may index with it."""


class PagePool:
    """Page ids only; the memory behind them is the engine's."""

    def __init__(self, *, pages: int, page_tokens: int, window: int | None = None) -> None:
        """`window`: how many tokens a token sees, itself included, in every layer."""
        if pages < 1 or page_tokens < 1 or (window is not None and window < 1):
            raise ValueError(
                f"a pool needs pages, tokens in them and in a window: {pages=}, {page_tokens=}, "
                f"{window=}"
            )
        self.pages = pages
        self.page_tokens = page_tokens
        self.window = window
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

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def passed(self, position: int) -> int:
        """How many pages no token from `position` on sees: the first ones."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // self.page_tokens

    def most_for(self, tokens: int, step: int) -> int:
        """Pages that a sequence of so many tokens holds at most, fed up to `step` at a time."""
        whole = self.pages_for(tokens)
        return whole if self.window is None else min(whole, self._span(self.window, step))

    def reach(self, start: int, end: int, step: int) -> int:
        """Up to which token a sequence of `end` has pages while it is fed those from `start` on:
        up to the last, or so that it holds as many as it ever will."""
        if self.window is None:
            return end
        return min(end, (self.passed(start) + self._span(self.window, step)) * self.page_tokens)

    def longest(self, wanted: int, step: int, pages: int) -> int:
        """Tokens of the longest sequence, up to `wanted`, that so many pages can hold."""
        return wanted if self.most_for(wanted, step) <= pages else pages * self.page_tokens

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
        """A table of the longest beginning that is known. Of its pages those that the token after
        them sees have one holder more; the others are RELEASED."""
        found = self.known(names)
        passed = self.passed(found * self.page_tokens)
        pages = [self._named[name] for name in names[passed:found]]
        for page in pages:
            self._cached.pop(page, None)  # it is there while nobody holds it
            self._holders[page] += 1
        return [RELEASED] * passed + pages

    def known(self, names: Sequence[bytes]) -> int:
        """How long a table `hold` would find."""
        if self.window is None:
            gaps = (at for at, name in enumerate(names) if name not in self._named)
            return next(gaps, len(names))
        found = run = 0
        for at, name in enumerate(names, start=1):
            run = run + 1 if name in self._named else 0
            if run + self.passed(at * self.page_tokens) >= at:
                found = at
        return found

    def distrust(self, names: Iterable[bytes]) -> None:
        """What these pages hold may be wrong: nobody is to find it by name any more."""
        for name in names:
            page = self._named.get(name)
            if page is None:
                continue
            self._forget(page)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def check(self, holdings: Iterable[Iterable[int]] | None = None) -> None:
        """`holdings`, where given: all the pages of each holder."""
        free, cached = set(self._free), set(self._cached)
        held = {page for page in range(self.pages) if self._holders[page]}
        assert min(self._holders) >= 0, "a page has lost more holders than it had"
        assert len(free) == len(self._free), "a page is free twice"
        every = sorted([*free, *held, *cached])
        assert every == list(range(self.pages)), "a page is lost, or two things at once"
        assert {page: name for name, page in self._named.items()} == self._names
        assert cached <= self._names.keys() <= cached | held, "named, yet nobody's"
        if holdings is not None:
            holders = Counter(page for pages in holdings for page in pages)
            assert [holders[page] for page in range(self.pages)] == self._holders, (
                "a holder is lost"
            )

    def _span(self, window: int, step: int) -> int:
        """Pages that so many tokens lie in at most, and those before them that the first sees."""
        return self.pages_for(window + step - 2) + 1

    def _is_held(self, page: int) -> bool:
        return 0 <= page < self.pages and self._holders[page] > 0

    def _forget(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is not None:
            del self._named[name]


class BlockTable:
    """The pages of one sequence, in the order of its tokens; the first `passed` are RELEASED."""

    __slots__ = ("_frozen", "pages", "passed")

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.passed = 0
        self._frozen: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def held(self) -> list[int]:
        """The pages that are not given back."""
        return self.pages[self.passed :]

    def share(self, names: Sequence[bytes], pool: PagePool) -> int:
        """Begin with pages that others filled; how many there are. Only for an empty table."""
        assert not self.pages, "shared pages come first"
        self.pages, self._frozen = pool.hold(names), None
        self.passed = pool.passed(len(self.pages) * pool.page_tokens)
        return len(self.pages)

    def move_on(self, position: int, pool: PagePool) -> None:
        """Give back the pages that no token from `position` on sees."""
        passed = pool.passed(position)
        if passed > self.passed:
            gone = self.pages[self.passed : passed]
            self.pages[self.passed : passed] = [RELEASED] * len(gone)
            self.passed, self._frozen = passed, None
            pool.free(gone)

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
        pages, self.pages, self.passed, self._frozen = self.held, [], 0, None
        pool.free(pages)

    def frozen(self) -> tuple[int, ...]:
        """The pages as a value. Built once a growth, since every step of a sequence asks."""
        if self._frozen is None:
            self._frozen = tuple(self.pages)
        return self._frozen
