"""Loader: adapters into their pages on a stream of their own, beside the steps.

Laws: a copy into pages that a step under way names begins after that step, which may still read or
write them; into all others it begins at once. No step waits for a copy. A slot's tables are written
on the steps' own stream, once the weights are there: after every step that found the slot as it
was, before every step that is launched later. The host waits for nothing, provided that the
adapter lies in pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from replica.engine.arena import Arena
from replica.engine.flight import Arrival
from replica.engine.host_adapter import HostAdapter


class Loader:
    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        on_gpu = arena.device.type == "cuda"
        self._stream = torch.cuda.Stream(arena.device) if on_gpu else None
        if self._stream is not None:  # after the pool was zeroed
            self._stream.wait_stream(torch.cuda.current_stream(arena.device))

    def load(
        self, slot: int, adapter: HostAdapter, pages: Sequence[int], named: Collection[int]
    ) -> Arrival | None:
        """`named` are pages that steps under way name."""
        if self._stream is None:
            self._arena.place(slot, adapter, pages)
            return None
        later = set(pages).intersection(named)
        queued = torch.cuda.current_stream(self._arena.device).record_event()
        with torch.cuda.stream(self._stream):
            try:
                self._arena.fill(adapter, pages, set(pages) - later)
                if later:
                    self._stream.wait_event(queued)
                    self._arena.fill(adapter, pages, later)
            except Exception:
                self._stream.synchronize()  # its pages are given back
                raise
            copied = self._stream.record_event()
        return _Copying(copied, lambda: self._arena.name(slot, adapter, pages))


class _Copying:
    def __init__(self, copied: torch.cuda.Event, name: Callable[[], None]) -> None:
        self._copied, self._name = copied, name
        self._there = False

    def query(self) -> bool:
        """Once it is copied, this names it."""
        if not self._there and self._copied.query():
            self._name()
            self._there = True
        return self._there
