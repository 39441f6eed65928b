"""Turns: who must wait so that an adapter that has no slot gets its turn.

Law: while an adapter has waited for its load longer than `wait_s`, slots drain for it, as few as
give it a slot and its share of the adapters' pages: no sequence that came later than its oldest
waiter may start in them. And while the pool itself has too few pages for it, no sequence that came
later starts anywhere, the base's included: it waits for pages, as everybody does, in the order of
arrival. So what the adapter needs is free once those who run now, and those who came before its
waiter, have ended: finitely many, each of finite length. The longest waiter chooses first, no slot
drains for two, and the slots chosen are those expected to be free first. A choice stands until the
adapter has a slot: changing it would start the wait anew. Where pages suffice the base has no slot
and is never held back.

Rows are not grouped by adapter to have fewer distinct ones in a step. Every decoding sequence is in
every step: leaving some out reads the base's weights once more to spare a fraction of that in
adapters, and takes a token from somebody in each step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from replica.core.adapter_cache import AdapterCache
from shared.ids import AdapterId


class Turns:
    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._drains: dict[AdapterId, list[int]] = {}  # starved adapter -> slots that drain for it
        self._closed: dict[int, float] = {}  # slot -> who came after this moment must wait
        self._closed_all: float | None = None  # the same for every slot, and for the base

    def update(
        self, cache: AdapterCache, tokens_left: Callable[[], Mapping[int, int]], now: float
    ) -> None:
        """`tokens_left`: for each held slot the longest that one of its sequences may still run."""
        starved = [item for item in cache.unplaced if now - item[1] > self._wait_s]
        self._closed, self._closed_all = {}, None
        if not starved:
            self._drains = {}
            return
        open_slots = set(cache.drainable())
        drains: dict[AdapterId, list[int]] = {}
        for adapter, _ in starved:
            kept = [slot for slot in self._drains.get(adapter, ()) if slot in open_slots]
            if kept:
                drains[adapter] = kept
                open_slots.difference_update(kept)
        free_after = tokens_left()
        left = deque(sorted(open_slots, key=lambda slot: (free_after.get(slot, 0), slot)))
        prospect = cache.prospect()
        for place, (adapter, since) in enumerate(starved):
            if place and not left and adapter not in drains:
                continue
            chosen, pages = drains.setdefault(adapter, []), cache.pages_of(adapter)
            while left and not prospect.fits(pages, chosen).slot:
                chosen.append(left.popleft())
            self._closed |= dict.fromkeys(chosen, since)
            fit = prospect.fits(pages, chosen)
            lacks_pages = not fit.pages or not (place or chosen)  # else it would be loading
            if self._closed_all is None and fit.slot and lacks_pages:
                self._closed_all = since
        self._drains = drains

    def closed(self, slot: int, arrived: float) -> bool:
        """Whether a sequence that came at `arrived` may not start in this slot now."""
        if self._closed_all is not None and arrived > self._closed_all:
            return True
        since = self._closed.get(slot)
        return since is not None and arrived > since
