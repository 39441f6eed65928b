"""Turns: which slots must drain so that an adapter without one gets its turn.

Law: while an adapter has waited for a slot longer than `wait_s`, one slot drains for it: no
sequence that came later than its oldest waiter may start in that slot. So the slot is free once
those who hold it, and those who came before the waiter, have ended: finitely many, each of finite
length. The longest waiter chooses first, no slot drains for two, and the slot chosen is the one
expected to be free first. A choice stands until the adapter has a slot: changing it would start
the wait anew. The base has no slot and is never held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from replica.core.adapter_cache import AdapterCache
from shared.ids import AdapterId


class Turns:
    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._drains: dict[AdapterId, int] = {}  # starved adapter -> the slot that drains for it
        self._closed: dict[int, float] = {}  # slot -> who came after this moment must wait

    def update(
        self, cache: AdapterCache, tokens_left: Callable[[], Mapping[int, int]], now: float
    ) -> None:
        """`tokens_left`: for each held slot the longest that one of its sequences may still run."""
        starved = [item for item in cache.unplaced if now - item[1] > self._wait_s]
        if not starved:
            self._drains, self._closed = {}, {}
            return
        free_after = tokens_left()
        open_slots = {slot: free_after.get(slot, 0) for slot in cache.drainable()}
        drains: dict[AdapterId, int] = {}
        for adapter, _ in starved:
            slot = self._drains.get(adapter)
            if slot in open_slots:
                drains[adapter] = slot
                del open_slots[slot]
        for adapter, _ in starved:
            if adapter not in drains and open_slots:
                slot = min(open_slots, key=lambda slot: (open_slots[slot], slot))
                drains[adapter] = slot
                del open_slots[slot]
        self._drains = drains
        self._closed = {drains[adapter]: since for adapter, since in starved if adapter in drains}

    def closed(self, slot: int, arrived: float) -> bool:
        """Whether a sequence that came at `arrived` may not start in this slot now."""
        since = self._closed.get(slot)
        return since is not None and arrived > since
