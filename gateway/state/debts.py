"""What is owed to the store's limits: corrections of what was reserved, and grants of an outage.

Corrections are gathered for a moment, then one is sent for each limit. What an outage has granted
is owed until the store is back, less what would have refilled since. A charge whose fate is unknown
(sent, never answered) is not repeated: it is wrong by one request at most, of a rate for a minute
at most.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.state.limits import Line
from gateway.store.redis import Store, StoreAway, Word
from shared import tasks
from shared.clock import Clock

_GATHER_S: Final = 0.2
_AWAY_S: Final = 0.5  # between looks whether the store is back
_STALE_S: Final = 1.0  # what is owed for longer than this refills meanwhile


@dataclass(slots=True)
class _Owed:
    line: Line
    at: float
    amount: float = 0.0  # negative: to give back

    def add(self, amount: float, now: float) -> None:
        if self.line.kind == "rate" and now - self.at > _STALE_S:
            refilled = self.line.limit / 60 * (now - self.at)
            self.amount = math.copysign(max(0.0, abs(self.amount) - refilled), self.amount)
            self.at = now
        self.amount += amount


class Debts:
    def __init__(self, store: Store, clock: Clock, noted: Callable[[StoreAway], None]) -> None:
        self._store = store
        self._clock = clock
        self._noted = noted
        self._owed: dict[tuple[str, str], _Owed] = {}
        self._timer: asyncio.TimerHandle | None = None

    def owe(self, line: Line, amount: float, now: float) -> None:
        """Never blocks, never raises."""
        if amount == 0 or line.kind == "lease":
            return
        where = (line.key, line.field)
        owed = self._owed.get(where)
        if owed is None:
            owed = self._owed[where] = _Owed(line, now)
        owed.line = line
        owed.add(amount, now)
        if self._timer is None:
            wait_s = _AWAY_S if self._store.away else _GATHER_S
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._due)

    async def pay(self) -> None:
        """Send what is owed, if the store takes it now."""
        owed, self._owed = self._owed, {}
        await asyncio.gather(*[self._charge(debt) for debt in owed.values()])

    async def close(self) -> None:
        await self.pay()
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        self._timer = None
        tasks.spawn(self.pay(), name="quota settle")

    async def _charge(self, owed: _Owed) -> None:
        owed.add(0, self._clock())
        line, amount = owed.line, round(owed.amount)
        if not amount:
            return
        words: list[Word]
        if line.kind == "rate":
            script, words = "settle", ["", line.field, line.limit, amount]
        else:
            script, words = "spend", [line.field, amount, round(line.until * 1e6)]
        try:
            await self._store.script(script, [line.key], words)
        except StoreAway as error:
            self._noted(error)
            if not error.sent:
                self.owe(line, amount, self._clock())
