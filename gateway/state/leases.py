"""The requests of this gateway that hold a lease of some concurrency limit.

A lease has an owner (the request) and an end, so it cannot leak: one whose gateway was killed is
free again when its `lease_s` is over. While a request runs its leases are prolonged three times in
that; when it ends they are given back at once, before anything this gateway asks afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Final

from gateway.state.limits import Line
from gateway.store.redis import Store, StoreAway, Word
from shared.ids import RequestId

_A_CALL: Final = 500  # leases prolonged in one call of the script: some 0.2 ms of the store's time


class Leases:
    def __init__(self, store: Store, lease_s: float, noted: Callable[[StoreAway], None]) -> None:
        self._store = store
        self._noted = noted
        self._held: dict[str, dict[RequestId, None]] = {}  # by the store's key
        self.lease_s = lease_s
        self._timer: asyncio.TimerHandle | None = None

    def take(self, lines: Iterable[Line], request: RequestId) -> None:
        """The store, or our own share, has granted them."""
        for line in lines:
            if line.kind == "lease":
                self._held.setdefault(line.key, {})[request] = None
                if self._timer is None:
                    self._arm()

    def release(self, lines: Iterable[Line], request: RequestId) -> None:
        for line in lines:
            if line.kind == "lease":
                held = self._held.get(line.key, {})
                held.pop(request, None)
                if not held:
                    self._held.pop(line.key, None)
                # asked at once: what this gateway reserves later finds the place free
                self._store.ask("lease", [line.key], [0, request], self._answered)

    def running(self, line: Line) -> int:
        return len(self._held.get(line.key, ()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.lease_s / 3, self._prolong)

    def _prolong(self) -> None:
        self._timer = None
        life_us = round(self.lease_s * 1e6)
        for key, held in self._held.items():
            requests = [*held]
            for at in range(0, len(requests), _A_CALL):
                words: list[Word] = [life_us, *requests[at : at + _A_CALL]]
                self._store.ask("lease", [key], words, self._answered)
        if self._held:
            self._arm()

    def _answered(self, reply: object) -> None:
        if isinstance(reply, StoreAway):
            self._noted(reply)
