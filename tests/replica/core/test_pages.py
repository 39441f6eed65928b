from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replica.core.pages import RELEASED, BlockTable, PagePool

TEXTS = st.lists(st.integers(0, 1), max_size=12)


def names_of(text: list[int]) -> list[bytes]:
    """A page holds one token here; its name is all tokens so far."""
    return [bytes(text[: end + 1]) for end in range(len(text))]


class Pages(RuleBasedStateMachine):
    """Tables that share, grow, fill, move on, lose their trust and are released in any order."""

    @initialize(pages=st.integers(1, 24), window=st.none() | st.integers(1, 6))
    def begin(self, pages: int, window: int | None) -> None:
        self.pool = PagePool(pages=pages, page_tokens=1, window=window)
        self.tables = [BlockTable() for _ in range(4)]
        self.texts: list[list[int]] = [[] for _ in self.tables]  # what is in the pages of each
        self.content: dict[int, bytes] = {}  # by page: what was written there last

    @rule(which=st.integers(0, 3), text=TEXTS)
    def start(self, which: int, text: list[int]) -> None:
        """A table begins with what is known of its text, and writes the rest."""
        table, names = self.tables[which], names_of(text)
        self.release(which)
        known = self.pool.known(names)
        shared = table.share(names, self.pool)
        assert shared == known == len(table)
        assert table.pages[: table.passed] == [RELEASED] * self.pool.passed(shared)
        for page, name in zip(table.held, names[table.passed :], strict=False):
            assert self.content[page] == name, "found under a name that is not its content's"
        for more in range(shared + 1, len(names) + 1):
            needed = names[self.pool.passed(more) : more]
            assert not all(self.pool.known([name]) for name in needed), "it finds less than it can"
        available = self.pool.available
        if not table.grow_to(len(text), self.pool):
            assert len(text) - shared > available
            text = text[:shared]
        assert len(table) == len(text)
        self.texts[which] = text
        for page, name in list(zip(table.pages, names, strict=False))[shared:]:  # all held
            self.content[page] = name

    @rule(which=st.integers(0, 3), count=st.integers(0, 12))
    def name(self, which: int, count: int) -> None:
        table = self.tables[which]
        names = names_of(self.texts[which])[table.passed :]
        for page, name in list(zip(table.held, names, strict=True))[:count]:
            self.pool.name(page, name)

    @rule(which=st.integers(0, 3), position=st.integers(0, 12))
    def move_on(self, which: int, position: int) -> None:
        """What its next tokens do not see it has not any more, and all else it has."""
        table, text = self.tables[which], self.texts[which]
        position = min(position, len(text))
        before = [*[RELEASED] * table.passed, *table.held]
        table.move_on(position, self.pool)
        seen = len(text) if self.pool.window is None else self.pool.window - 1
        gone = max(0, position - seen)
        assert table.pages[: max(gone, table.passed)] == [RELEASED] * max(gone, table.passed)
        assert table.pages[gone:] == before[gone:]

    @rule(which=st.integers(0, 3))
    def distrust(self, which: int) -> None:
        self.pool.distrust(names_of(self.texts[which]))

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        available, cached = self.pool.available, self.pool.cached
        self.tables[which].release(self.pool)
        self.tables[which].release(self.pool)
        assert self.tables[which].frozen() == ()
        assert self.pool.available >= available
        assert self.pool.cached >= cached, "who leaves takes nothing from the cache"
        self.texts[which] = []

    @invariant()
    def held_cached_and_free_partition_the_pool(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([table.held for table in self.tables])
        for table, text in zip(self.tables, self.texts, strict=True):
            assert table.frozen() == tuple(table.pages)
            written = [self.content[page] for page in table.held]
            assert written == names_of(text)[table.passed :], (
                "another wrote to a page that it holds"
            )

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                table.release(self.pool)
            assert self.pool.available == self.pool.pages


TestPages = Pages.TestCase


@given(pages=st.integers(1, 50), wanted=st.integers(0, 80))
def test_an_allocation_is_all_or_nothing(pages: int, wanted: int) -> None:
    pool = PagePool(pages=pages, page_tokens=1)
    taken = pool.allocate(wanted)
    assert (taken is None) == (wanted > pages)
    assert pool.available == pages - len(taken or ())
    pool.check()


@pytest.mark.parametrize("pages", [[0, 0], [1], [0, 7], [-1]])
def test_what_is_not_held_cannot_be_freed_and_nothing_else_is_freed_with_it(
    pages: list[int],
) -> None:
    pool = PagePool(pages=4, page_tokens=1)
    assert pool.allocate(1) == [0]
    with pytest.raises(ValueError, match="freed twice, or never allocated"):
        pool.free(pages)
    assert pool.available == 3
    pool.check()


def _filled(pool: PagePool, text: bytes) -> list[int]:
    """Pages of a text, computed, named and given back."""
    pages = pool.allocate(len(text))
    assert pages is not None
    for page, name in zip(pages, names_of(list(text)), strict=True):
        pool.name(page, name)
    pool.free(pages)
    return pages


def test_the_least_recently_held_is_forgotten_first_and_of_one_text_its_end() -> None:
    pool = PagePool(pages=6, page_tokens=1)
    old, new = _filled(pool, b"abc"), _filled(pool, b"xyz")
    assert (pool.available, pool.cached) == (6, 6)
    pool.free(pool.hold(names_of(list(b"abc"))))  # a use
    assert pool.allocate(2) == [new[1], new[2]]
    assert pool.known(names_of(list(b"xyz"))) == 1
    assert pool.allocate(3) == [old[1], old[2], new[0]]
    assert pool.known(names_of(list(b"abc"))) == 1


def test_the_first_page_of_a_name_keeps_it() -> None:
    pool = PagePool(pages=4, page_tokens=1)
    first, second = pool.allocate(2) or ()
    for page in (first, second):
        pool.name(page, b"same")
    pool.free([first, second])
    assert (pool.available, pool.cached) == (4, 1)
    assert pool.hold([b"same", b"other", b"same"]) == [first]
