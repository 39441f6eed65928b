"""Tenants and their API keys: the truth in the store, a snapshot of it in memory.

A request asks only the snapshot (one hash, one dict look-up). A change goes to the store as one
script that checks the version the caller saw; it raises the registry's generation and publishes
it, and every gateway that hears of a generation it does not have reads the whole registry anew.
Pub/sub may lose a message, so the generation is also polled. Law: a snapshot is never older than
`poll_s` while the store answers, and `loaded` is False until the store was read once.

A secret is kept as its SHA-256 only. Looking a digest up in a dict leaks timing about digests,
and nobody can steer a digest of 192 random bits: `hmac.compare_digest` would guard nothing here.
A fast hash is right for the same reason: there is no weak password to slow down a guess at, unless
an operator brings one along.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import orjson

from gateway.snapshot import Snapshot, snapshot_of
from gateway.store.redis import Store, StoreAway, Word
from gateway.tenants import (
    BadField,
    Conflict,
    Key,
    Limits,
    Missing,
    RegistryError,
    Tenant,
    bucket_key,
    changed_limits,
    checked,
    checked_name,
    checked_secret,
    encoded,
)
from shared import tasks
from shared.clock import Clock, wall
from shared.ids import TenantId

# the words of the registry are imported from here
__all__ = ["BadField", "Conflict", "Key", "Limits", "Missing"]
__all__ += ["Registry", "RegistryError", "Tenant"]

_log = logging.getLogger(__name__)

KEYS_MAX: Final = 100

_TENANTS: Final = "tenants"
_KEYS: Final = "keys"
_GENERATION: Final = "registry"
_ATTEMPTS: Final = 5


class Registry:
    """Reads are synchronous and never fail; changes raise RegistryError or StoreAway."""

    def __init__(self, store: Store, *, clock: Clock = wall, poll_s: float = 5.0) -> None:
        self._store = store
        self._clock = clock
        self._poll_s = poll_s
        self._now = Snapshot(-1, {}, {}, {}, {})
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
        return self._now.by_digest.get(digest)

    def may_use(self, tenant: Tenant, model: str) -> bool:
        """By today's registry: a tenant deleted since may use nothing."""
        models = self._now.models.get(tenant.id, frozenset())
        return "*" in models or model in models

    def tenant(self, tenant_id: str) -> Tenant | None:
        return self._now.tenants.get(tenant_id)

    def tenants(self) -> tuple[Tenant, ...]:
        return tuple(sorted(self._now.tenants.values(), key=lambda tenant: tenant.id))

    def keys(self, tenant_id: str) -> tuple[Key, ...]:
        return self._now.keys.get(tenant_id, ())

    # changes

    async def create(
        self,
        tenant_id: str,
        *,
        weight: float = 1.0,
        models: Iterable[str] = ("*",),
        limits: Limits = Limits(),  # noqa: B008  (frozen)
    ) -> Tenant:
        tenant = checked(
            Tenant(TenantId(tenant_id), weight, tuple(models), limits, created=self._clock())
        )
        version = await self._write(tenant, expect_version=0)
        if version < 0:
            raise Conflict(f"id: a tenant {tenant_id!r} exists already; change that one")
        return replace(tenant, version=version)

    async def set(
        self,
        tenant_id: str,
        *,
        weight: float | None = None,
        models: Iterable[str] | None = None,
        limits: Limits | Mapping[str, int | None] | None = None,
        expect_version: int | None = None,
    ) -> Tenant:
        """Change what is given and keep the rest; a mapping changes the limits it names."""
        wanted_models = None if models is None else tuple(models)
        for _ in range(_ATTEMPTS):
            await self._read()
            old = self.tenant(tenant_id)
            if old is None:
                raise Missing(f"There is no tenant {tenant_id!r}.")
            if expect_version not in (None, old.version):
                raise _stale(tenant_id, old.version)
            new = checked(
                replace(
                    old,
                    weight=old.weight if weight is None else weight,
                    models=old.models if wanted_models is None else wanted_models,
                    limits=changed_limits(old.limits, limits),
                )
            )
            version = await self._write(new, expect_version=old.version)
            if version > 0:
                return replace(new, version=version)
        raise Conflict(f"The tenant {tenant_id!r} is being changed by others; try again.")

    async def delete(self, tenant_id: str, *, expect_version: int | None = None) -> None:
        """Its keys and buckets go with it; its usage stays in the ledger."""
        checked_name("id", tenant_id)
        done = await self._store.change(
            "tenant_delete",
            [_TENANTS, _GENERATION, _KEYS, bucket_key(tenant_id)],
            [tenant_id, expect_version or 0],
        )
        if done < 0:
            raise _stale(tenant_id, -done)
        await self._read()
        if done == 0:
            raise Missing(f"There is no tenant {tenant_id!r}.")

    async def key_create(self, tenant_id: str, secret: str | None = None) -> tuple[Key, str]:
        """A new key and its secret, which is shown now and never again.

        A secret that clients already hold can be brought along; it must be nobody's yet.
        """
        checked_name("id", tenant_id)
        if secret is None:
            secret = "lp-" + secrets.token_urlsafe(24)
        elif self.tenant_for_key(checked_secret(secret)) is not None:
            raise Conflict("secret: this key exists already; revoke it first")
        prefix = secret[: min(7, len(secret) // 2)]
        key = Key(secrets.token_hex(8), TenantId(tenant_id), prefix, self._clock())
        value = {
            "digest": hashlib.sha256(secret.encode()).hexdigest(),
            "prefix": key.prefix,
            "created": key.created,
        }
        done = await self._store.change(
            "key_write",
            [_TENANTS, _GENERATION, _KEYS],
            [tenant_id, key.id, orjson.dumps(value), KEYS_MAX],
        )
        if done == 0:
            raise Missing(f"There is no tenant {tenant_id!r}.")
        if done < 0:
            raise Conflict(f"The tenant {tenant_id!r} has {KEYS_MAX} keys; revoke one first.")
        await self._read()
        return key, secret

    async def key_revoke(self, tenant_id: str, key_id: str) -> None:
        done = await self._store.change(
            "key_delete",
            [_GENERATION, _KEYS],
            [checked_name("id", tenant_id), checked_name("key_id", key_id)],
        )
        await self._read()
        if done == 0:
            raise Missing(f"The tenant {tenant_id!r} has no key {key_id!r}.")

    async def _write(self, tenant: Tenant, *, expect_version: int) -> int:
        words: list[Word] = [tenant.id, encoded(tenant), expect_version]
        version: int = await self._store.change("tenant_write", [_TENANTS, _GENERATION], words)
        await self._read()
        return version

    # following the store

    async def _listen(self) -> None:
        while True:
            try:
                async for _ in self._store.listen(_GENERATION):
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
            generation = await self._store.number(_GENERATION)
            if generation != self._now.generation:
                tenants, keys = await self._store.hashes([_TENANTS, _KEYS])
                self._now = await snapshot_of(generation, tenants, keys)


def _stale(tenant_id: str, version: int) -> Conflict:
    return Conflict(f"The tenant {tenant_id!r} has version {version} now; read it and try again.")
