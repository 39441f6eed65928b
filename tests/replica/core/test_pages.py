from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replica.core.pages import BlockTable, PagePool


class Pages(RuleBasedStateMachine):
    """Tables that grow and are released in any order."""

    @initialize(pages=st.integers(1, 24), page_tokens=st.integers(1, 5))
    def begin(self, pages: int, page_tokens: int) -> None:
        self.pool = PagePool(pages=pages, page_tokens=page_tokens)
        self.tables = [BlockTable() for _ in range(4)]

    @rule(which=st.integers(0, 3), tokens=st.integers(0, 60))
    def grow(self, which: int, tokens: int) -> None:
        table = self.tables[which]
        before, available = list(table.pages), self.pool.available
        grown = table.grow_to(tokens, self.pool)
        missing = self.pool.pages_for(tokens) - len(before)
        assert grown == (missing <= available)
        assert table.pages[: len(before)] == before
        if grown:
            assert len(table) * self.pool.page_tokens >= tokens
        else:
            assert (table.pages, self.pool.available) == (before, available)

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        self.tables[which].release(self.pool)
        self.tables[which].release(self.pool)
        assert self.tables[which].frozen() == ()

    @invariant()
    def free_and_used_partition_the_pool(self) -> None:
        self.pool.check()
        held = [page for table in self.tables for page in table.pages]
        assert len(held) == len(set(held)), "a page is in two tables"
        assert len(held) + self.pool.available == self.pool.pages
        for table in self.tables:
            assert table.frozen() == tuple(table.pages)

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
def test_what_is_not_in_use_cannot_be_freed_and_nothing_else_is_freed_with_it(
    pages: list[int],
) -> None:
    pool = PagePool(pages=4, page_tokens=1)
    assert pool.allocate(1) == [0]
    with pytest.raises(ValueError, match="freed twice, or never allocated"):
        pool.free(pages)
    assert pool.available == 3
    pool.check()
