"""Loader: adapters into their pages on a stream of their own, beside the steps.

Law: a copy begins after every step that was queued before it, for such a step may still read what
the pages held; no step waits for a copy, for rows name its slot only once it has arrived. The host
waits for neither, provided that the adapter lies in pinned memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from replica.engine.arena import Arena
from replica.engine.flight import Arrival
from replica.engine.host_adapter import HostAdapter


class Loader:
    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        on_gpu = arena.device.type == "cuda"
        self._stream = torch.cuda.Stream(arena.device) if on_gpu else None

    def load(self, slot: int, adapter: HostAdapter, pages: Sequence[int]) -> Arrival | None:
        if self._stream is None:
            self._arena.place(slot, adapter, pages)
            return None
        queued = torch.cuda.current_stream(self._arena.device).record_event()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(queued)
            self._arena.place(slot, adapter, pages)
            arrival: Arrival = self._stream.record_event()
        return arrival
