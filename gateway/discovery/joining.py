"""Replicas that announce themselves: a list of leases in the store, so that every gateway sees it.

A replica joins under its name with its address, through any gateway, and says so again before its
lease ends; or it gives its place up. Laws: while a lease runs its name is one address's; what was
not renewed is no longer named after `lease_s`, by the store's clock; a store that is away changes
nothing. What a gateway then does with one that is no longer named, the census says: a replica that
still reports stays.

Each change of the list is one event, however many gateways saw it, and a renewal is none:
`replica.joined` (also at another address, or as something else), `replica.left`, and
`replica.expired` when a lease ended and the list forgot it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

from gateway.config import DiscoveryConfig, ReplicaEntry
from gateway.edge.upstream import Upstream
from gateway.state.audit import EVENTS, EVENTS_MAX, event
from gateway.state.tenants import Conflict
from gateway.store.redis import Store, StoreAway, Word
from shared.clock import Clock, wall
from shared.ids import ReplicaId

_log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""A replica that joined at one gateway is known to the others after this."""

_KEY: Final = "joined"


class Joining:
    def __init__(
        self,
        store: Store,
        config: DiscoveryConfig,
        *,
        told: Callable[[Mapping[ReplicaId, ReplicaEntry]], None],
        clock: Clock = wall,
    ) -> None:
        """`clock`: the events'."""
        self._store = store
        self._config = config
        self._told = told
        self._clock = clock
        self._read: dict[bytes, ReplicaEntry | None] = {}  # of the last look; None: unreadable

    async def run(self) -> None:
        """Follow the list until cancelled."""
        while True:
            try:
                await self.look()
            except StoreAway as error:
                _log.debug("list of joined replicas not read", extra={"reason": str(error)})
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Tell who is on it, and have the list forget whose lease has ended. Raises StoreAway."""
        reply = await self._store.script("joined", [_KEY], [])
        rows = zip(reply[::2], reply[1::2], strict=True)
        entries, read, ended = {}, {}, []
        for name, text in rows:
            if not text:
                ended.append(bytes(name).decode())
                continue
            entry = read[text] = self._read[text] if text in self._read else _entry(text)
            if entry is not None:
                entries[ReplicaId(bytes(name).decode())] = entry
        self._read = read
        self._told(entries)
        for name in ended:
            told = event("replica.expired", name, self._clock(), why="lease not renewed")
            await self._store.change("expire", [_KEY, EVENTS], [name, told, EVENTS_MAX])

    async def join(self, entry: ReplicaEntry) -> None:
        """It is on the list for `lease_s` when this returns. Raises Conflict, StoreAway."""
        text = entry.model_dump_json(exclude_defaults=True)
        told = event(
            "replica.joined",
            entry.id,
            self._clock(),
            url=entry.url,
            kind=entry.kind,
            base=entry.base,
        )
        verdict = await self._write(entry.id, entry.url, text, told)
        if verdict == "full":
            most = self._config.members_max
            raise Conflict(f"The list has {most} replicas already (discovery.members_max).")
        if verdict:
            url, _, micros = verdict.rpartition(" ")
            left_s = math.ceil(int(micros) / 1e6)
            raise Conflict(
                f"The name {entry.id!r} is {url}'s for another {left_s} s, and longer if that "
                "replica lives: give this one a name of its own."
            )

    async def leave(self, name: str, url: str) -> None:
        """It is not on the list under this address when this returns. Raises StoreAway."""
        await self._write(name, url, "", event("replica.left", name, self._clock(), url=url))

    async def _write(self, name: str, url: str, entry: str, told: bytes) -> str:
        config = self._config
        words: list[Word] = [name, url, entry, round(config.lease_s * 1e6), config.members_max]
        words += [told, EVENTS_MAX]
        return str(await self._store.change("join", [_KEY, EVENTS], words))


def _entry(text: bytes) -> ReplicaEntry | None:
    """None for what a newer gateway may have written."""
    try:
        entry = ReplicaEntry.model_validate_json(text)
        Upstream(entry.url, connect_timeout_s=1)
    except ValueError as error:  # pydantic's are, too
        _log.warning("joined replica not understood", extra={"why": str(error)})
        return None
    return entry
