"""The registry's state in memory: read once, then kept as fresh as the store tells.

A change raises the registry's generation and publishes it, and every gateway that hears of a
generation it does not have reads the whole registry anew. Pub/sub may lose a message, so the
generation is also polled. Law: a snapshot is never older than `poll_s` while the store answers, and
`loaded` is False until the store was read once.

A secret is kept as its SHA-256 only. Looking a digest up in a dict leaks timing about digests,
and nobody can steer a digest of 192 random bits: `hmac.compare_digest` would guard nothing here.
A fast hash is right for the same reason: there is no weak password to slow down a guess at, unless
an operator brings one along; for those, failures are throttled by address (completion/auth.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from typing import Final

from gateway.state.adapter_records import AdapterRecord
from gateway.state.prices import Price, price_of
from gateway.state.snapshot import Snapshot, snapshot_of
from gateway.state.tenants import Key, Tenant
from gateway.store.redis import Store, StoreAway
from shared import tasks
from shared.clock import Clock, wall

_log = logging.getLogger(__name__)

TENANTS: Final = "tenants"
KEYS: Final = "keys"
ADAPTERS: Final = "adapters"
PRICES: Final = "prices"
GENERATION: Final = "registry"


class Follower:
    """Reads are synchronous and never fail."""

    def __init__(self, store: Store, *, clock: Clock = wall, poll_s: float = 5.0) -> None:
        self._store = store
        self._clock = clock
        self._poll_s = poll_s
        self._now = Snapshot()
        self._desired_of = self._now
        self._desired: tuple[AdapterRecord, ...] = ()
        self._reading = asyncio.Lock()
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    @property
    def loaded(self) -> bool:
        """The store was read: an unknown key is now really unknown."""
        return self._now.generation >= 0

    async def start(self) -> None:
        """Read the store if it is there; go on trying if it is not."""
        try:
            await self._read()
        except StoreAway as error:
            _log.warning("registry not loaded yet", extra={"reason": str(error)})
        self._tasks = (
            tasks.spawn(self._listen(), name="registry listen"),
            tasks.spawn(self._poll(), name="registry poll"),
        )

    async def close(self) -> None:
        await tasks.stop(*self._tasks)

    # the hot path

    def tenant_for_key(self, secret: str) -> Tenant | None:
        # surrogateescape: a header may hold any bytes, and the answer to those is "no" as well
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
        now = self._now
        if now.expires and self._clock() >= now.expires.get(digest, float("inf")):
            return None
        return now.by_digest.get(digest)

    def may_use(self, tenant: Tenant, model: str) -> bool:
        """By today's registry: a tenant deleted since may use nothing."""
        models = self._now.models.get(tenant.id, frozenset())
        if not ("*" in models or model in models):
            return False
        record = self._now.adapters.get(model)
        return record is None or record.open_to(tenant.id)

    def current(self, adapter: str) -> str:
        """The digest, or its beginning, that the adapter's plain name means; "": any."""
        record = self._now.adapters.get(adapter)
        return "" if record is None else record.current

    def price(self, tenant: str, model: str) -> Price:
        return price_of(self._now.prices, tenant, model)

    # the rest

    def tenant(self, tenant_id: str) -> Tenant | None:
        return self._now.tenants.get(tenant_id)

    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(sorted(self._now.tenants.values(), key=lambda tenant: tenant.id))

    def keys(self, tenant_id: str) -> tuple[Key, ...]:
        return self._now.keys.get(tenant_id, ())

    def adapter(self, name: str) -> AdapterRecord | None:
        return self._now.adapters.get(name)

    def adapters(self) -> tuple[AdapterRecord, ...]:
        return tuple(sorted(self._now.adapters.values(), key=lambda record: record.name))

    def desired(self) -> tuple[AdapterRecord, ...]:
        """Those that servers are to hold: their current version has a path. Kept a generation."""
        if self._desired_of is not self._now:
            self._desired_of = self._now
            self._desired = tuple(one for one in self.adapters() if one.path)
        return self._desired

    def prices(self) -> Sequence[tuple[str, str, Price, int]]:
        """Tenant, model, price and version, in order."""
        now = self._now
        return [(*key, now.prices[key], now.price_versions[key]) for key in sorted(now.prices)]

    # following the store

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._store.listen(GENERATION):
                    await self._read()
            except StoreAway as error:
                _log.info("registry channel lost", extra={"reason": str(error)})
            await asyncio.sleep(min(1.0, self._poll_s))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s if self.loaded else min(0.5, self._poll_s))
            try:
                await self._read()
            except StoreAway as error:
                _log.debug("registry not read", extra={"reason": str(error)})

    async def _read(self) -> None:
        """Take the store's state, unless it is the one held. The generation is read first, so a
        change in between can only make the snapshot newer than its number, never older."""
        async with self._reading:
            generation = await self._store.number(GENERATION)
            if generation != self._now.generation:
                rows = await self._store.hashes([TENANTS, KEYS, ADAPTERS, PRICES])
                self._now = await snapshot_of(generation, *rows)
