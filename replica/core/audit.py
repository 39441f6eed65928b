"""Audit: what must hold between sequences, pages and slots after any call to the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replica.core.adapter_cache import AdapterCache
from replica.core.live import Live
from replica.core.pages import PagePool
from replica.core.step import BASE_SLOT


def audit(
    running: Sequence[Live],
    waiting: Sequence[Live],
    live: Mapping[str, Live],
    *,
    pool: PagePool,
    cache: AdapterCache,
) -> None:
    here = {entry.seq.id: entry for entry in (*running, *waiting)}
    assert here == live, "a sequence is lost, or is not live"
    assert len(here) == len(running) + len(waiting), "it runs and waits"
    orders = [entry.order for entry in running]
    assert orders == sorted(orders), "running is out of order"
    tables = [entry.table.held for entry in here.values()]
    pool.check([*tables, *cache.holdings()])
    for entry in here.values():
        entry.check(pool.page_tokens)
        held = cache.slot_held(entry.seq.id)
        assert entry.slot == (BASE_SLOT if held is None else held), "a slot without its lease"
    assert all(not entry.table.pages for entry in waiting), "pages are held while waiting"
