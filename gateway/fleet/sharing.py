"""Fair shares over several gateways: each says what its tenants were served, and hears the others.

Every `EVERY_S` while anything runs or waits here, in one call of a script. A store that is away
costs fairness over gateways for that time, and nothing else: each gateway's own queue goes on. So
does a gateway that says nonsense.
"""

from __future__ import annotations

import asyncio
import logging
from secrets import token_hex
from typing import Final

import orjson

from gateway.core.dispatcher import Dispatcher
from gateway.core.service import Account, Elsewhere, Service
from gateway.store.redis import Store, StoreAway, Word
from shared.ids import TenantId

_log = logging.getLogger(__name__)

EVERY_S: Final = 0.2
_COUNTS_S: Final = 1.0  # what was said counts so long: a few exchanges
_TENANTS_MAX: Final = 2000  # in one message: those with the most in flight


class Sharing:
    def __init__(self, store: Store, dispatcher: Dispatcher) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._name = token_hex(8)
        self._account = Account()
        self._elsewhere = Elsewhere()

    async def run(self) -> None:
        busy = False
        while True:
            await asyncio.sleep(EVERY_S)
            was, busy = busy, bool(self._dispatcher.in_flight or self._dispatcher.queued)
            if not (busy or was):  # once more after the last, to say that nothing runs
                continue
            try:
                await self.exchange()
            except (StoreAway, LookupError, TypeError, ValueError) as error:
                _log.debug("shares not exchanged", extra={"reason": repr(error)})

    async def exchange(self) -> None:
        """Raises StoreAway."""
        queue = self._dispatcher
        mine = self._account.tell(queue.take_served(), queue.running())
        if len(mine) > _TENANTS_MAX:
            most = sorted(mine.items(), key=lambda item: (-item[1].running, item[0]))
            mine = dict(most[:_TENANTS_MAX])
        said = orjson.dumps({tenant: [*service] for tenant, service in mine.items()})
        words: list[Word] = [self._name, said, round(_COUNTS_S * 1e6)]
        reply = await self._store.script("serve", ["serving"], words)
        told = {
            bytes(name).decode(): _read(theirs)
            for name, theirs in zip(reply[::2], reply[1::2], strict=True)
        }
        for tenant, (served, running) in self._elsewhere.heard(told).items():
            queue.served_elsewhere(tenant, served, running)


def _read(said: bytes) -> dict[TenantId, Service]:
    """Of a gateway that may be newer: what it says beside the two numbers is not ours."""
    return {
        TenantId(tenant): Service(float(row[0]), float(row[1]))
        for tenant, row in orjson.loads(said).items()
    }
