"""Sharing: a sequence begins with pages that others have computed, and leaves its own to others.

Laws: a sequence shares the longest run of pages whose names its own tokens have, and at least its
last token is computed by itself; a page is named in the moment it is full and computed, so what can
be found is true; who would compute what another one is computing already waits for it, a few steps
at most, because that one runs and is older in the batch. A sequence whose prompt is to be scored
shares nothing, for pages have no scores. At its start a sequence takes all the pages that it will
hold at once for what it has to compute; where the base has a window (`pages.py`) these move on with
it, so that a prompt that is longer than the pool is no reason to wait for more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from replica.core.live import Live
from replica.core.pages import RELEASED, PagePool
from replica.core.prefix import PageNames, root


class Sharing:
    def __init__(self, *, pool: PagePool, step_tokens: int) -> None:
        """`step_tokens` of one sequence, at most, are fed in a step."""
        self._pool = pool
        self._step_tokens = step_tokens
        self._coming: dict[bytes, Live] = {}  # names of pages being computed, and by whom

    def waits(self, entry: Live, digest: str) -> bool:
        """Whether somebody is just computing what it would begin with. `digest` is its weights'."""
        if entry.scores_prompt:
            return False
        names = self._names(entry, digest)
        found = self._pool.known(names)
        return found < len(names) and names[found] in self._coming

    def begin(self, entry: Live, digest: str, make_room: Callable[[int], bool]) -> bool:
        """Its empty table holds what there is and is covered, and the rest of its prompt is
        coming; False, and nothing is held, when `make_room` has no room for the pages missing."""
        names = self._names(entry, digest)
        shared = 0 if entry.scores_prompt else entry.table.share(names, self._pool)
        start = shared * self._pool.page_tokens
        reach = self._pool.reach(start, entry.length, self._step_tokens)
        if not make_room(self._pool.pages_for(reach) - shared):
            entry.table.release(self._pool)
            return False
        entry.table.grow_to(reach, self._pool)
        entry.seq.computed, entry.published = start, shared
        for name in names[shared:]:
            self._coming.setdefault(name, entry)
        return True

    def cover(self, entry: Live) -> int:
        """Have pages for its next row, and give back those that it has passed. How many the pool
        lacks for that, in which case the table has not grown."""
        table, reach = entry.table, entry.length
        if self._pool.window is not None:  # most have none, and this is done for each of a step
            start = entry.seq.computed
            table.move_on(start, self._pool)
            reach = self._pool.reach(start, reach, self._step_tokens)
        if table.grow_to(reach, self._pool):
            return 0
        return self._pool.pages_for(reach) - len(table)

    def publish(self, entry: Live, end: int) -> None:
        """Its tokens up to `end` are computed and known: what is full of them can be found."""
        full = end // self._pool.page_tokens
        if full > entry.published and entry.names is not None and entry.table.pages:
            names = entry.names.first(full, entry.seq)[entry.published :]
            for page, name in zip(entry.table.pages[entry.published :], names, strict=False):
                if page != RELEASED:  # passed before the step was known, by who plans ahead
                    self._pool.name(page, name)
            self._no_longer(entry, names)
            entry.published = full

    def end(self, entry: Live, *, distrust: bool = False) -> None:
        """It runs no more, and gives its pages back; `distrust`: nobody is to find them."""
        if entry.names is not None:
            self._no_longer(entry, entry.names.made)
            if distrust:
                self._pool.distrust(entry.names.made[: entry.published])
        entry.table.release(self._pool)
        entry.seq.computed = entry.published = 0

    def check(self, running: Collection[Live]) -> None:
        assert all(entry in running for entry in self._coming.values()), "nobody computes it"
        for entry in running:
            table, most = entry.table, self._pool.most_for(entry.length, self._step_tokens)
            passed = self._pool.passed(entry.seq.computed)
            assert table.passed <= passed, "its next token sees what it gave back"
            assert table.pages.count(RELEASED) == table.passed, "a place is named twice"
            assert RELEASED not in table.held, "it gave back what it holds"
            assert len(table.held) <= most, "it keeps what it has passed"

    def _names(self, entry: Live, digest: str) -> list[bytes]:
        """Of the pages before its last token."""
        namespace = root(digest, entry.seq.salt)
        if entry.names is None or not entry.names.belongs_to(namespace):
            entry.names = PageNames(root=namespace, page_tokens=self._pool.page_tokens)
        return entry.names.first((entry.length - 1) // self._pool.page_tokens, entry.seq)

    def _no_longer(self, entry: Live, names: Collection[bytes]) -> None:
        for name in names:
            if self._coming.get(name) is entry:
                del self._coming[name]
