"""Tenants and their API keys, adapters' records and prices: the truth is in the store.

A request asks only a snapshot in memory (state/follower.py: one hash, one dict look-up). A change
goes to the store as one script that checks the version the caller saw, raises the registry's
generation, and writes the event that tells of it (state/audit.py).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import orjson

from gateway.state.audit import EVENTS, EVENTS_MAX, event
from gateway.state.catalogue import ATTEMPTS, Catalogue, stale
from gateway.state.follower import GENERATION, KEYS, TENANTS
from gateway.state.tenants import (
    NO_LIMITS,
    BadField,
    Conflict,
    Key,
    Limits,
    LimitsChange,
    Missing,
    RegistryError,
    Tenant,
    bucket_key,
    changed_adapter_limits,
    changed_limits,
    checked,
    checked_name,
    checked_secret,
    encoded,
)
from shared.ids import TenantId

# the words of the registry are imported from here
__all__ = ["BadField", "Conflict", "Key", "Limits", "Missing"]
__all__ += ["Registry", "RegistryError", "Tenant"]

KEYS_MAX: Final = 100
GRACE_MAX_S: Final = 31 * 86_400


class Registry(Catalogue):
    """Reads are synchronous and never fail; changes raise RegistryError or StoreAway."""

    async def create(
        self,
        tenant_id: str,
        *,
        weight: float = 1.0,
        models: Iterable[str] = ("*",),
        limits: Limits = NO_LIMITS,
        adapter_limits: Mapping[str, Limits] | None = None,
        shadow: bool = False,
    ) -> Tenant:
        tenant = checked(
            Tenant(
                TenantId(tenant_id),
                weight,
                tuple(models),
                limits,
                adapter_limits or {},
                shadow,
                created=self._clock(),
            )
        )
        version = await self._write(tenant, "tenant.created", expect_version=0)
        if version < 0:
            raise Conflict(f"id: a tenant {tenant_id!r} exists already; change that one")
        return replace(tenant, version=version)

    async def set(
        self,
        tenant_id: str,
        *,
        weight: float | None = None,
        models: Iterable[str] | None = None,
        limits: LimitsChange | None = None,
        adapter_limits: Mapping[str, LimitsChange | None] | None = None,
        shadow: bool | None = None,
        expect_version: int | None = None,
    ) -> Tenant:
        """Change what is given and keep the rest; a mapping changes the limits it names."""
        wanted_models = None if models is None else tuple(models)
        for _ in range(ATTEMPTS):
            await self._read()
            old = self.tenant(tenant_id)
            if old is None:
                raise _no_tenant(tenant_id)
            if expect_version not in (None, old.version):
                raise stale(f"tenant {tenant_id!r}", old.version)
            new = checked(
                replace(
                    old,
                    weight=old.weight if weight is None else weight,
                    models=old.models if wanted_models is None else wanted_models,
                    limits=changed_limits(old.limits, limits),
                    adapter_limits=changed_adapter_limits(old.adapter_limits, adapter_limits),
                    shadow=old.shadow if shadow is None else shadow,
                )
            )
            version = await self._write(new, "tenant.changed", expect_version=old.version)
            if version > 0:
                return replace(new, version=version)
        raise Conflict(f"The tenant {tenant_id!r} is being changed by others; try again.")

    async def delete(self, tenant_id: str, *, expect_version: int | None = None) -> None:
        """Its keys and buckets go with it; its usage stays in the ledger."""
        checked_name("id", tenant_id)
        told = event("tenant.deleted", tenant_id, self._clock())
        done = await self._store.change(
            "tenant_delete",
            [TENANTS, GENERATION, EVENTS, KEYS, bucket_key(tenant_id)],
            [tenant_id, expect_version or 0, told, EVENTS_MAX],
        )
        if done < 0:
            raise stale(f"tenant {tenant_id!r}", -done)
        await self._read()
        if done == 0:
            raise _no_tenant(tenant_id)

    # keys

    async def key_create(self, tenant_id: str, secret: str | None = None) -> tuple[Key, str]:
        """A new key and its secret, which is shown now and never again.

        A secret that clients already hold can be brought along; it must be nobody's yet.
        """
        return await self._key(tenant_id, secret, "key.created")

    async def key_rotate(
        self, tenant_id: str, key_id: str, *, grace_s: float = 0.0
    ) -> tuple[Key, str]:
        """A new key in place of one, which still works for `grace_s`: time to hand out the new."""
        checked_name("key_id", key_id)
        number = isinstance(grace_s, int | float) and not isinstance(grace_s, bool)
        if not (number and 0 <= grace_s <= GRACE_MAX_S):
            raise BadField("grace_s", f"must be seconds, at most {GRACE_MAX_S} (31 days)")
        return await self._key(tenant_id, None, "key.rotated", old=key_id, grace_s=grace_s)

    async def key_revoke(self, tenant_id: str, key_id: str) -> None:
        tenant_id, key_id = checked_name("id", tenant_id), checked_name("key_id", key_id)
        told = event("key.revoked", tenant_id, self._clock(), key=key_id)
        done = await self._store.change(
            "key_delete", [GENERATION, EVENTS, KEYS], [tenant_id, key_id, told, EVENTS_MAX]
        )
        await self._read()
        if done == 0:
            raise _no_key(tenant_id, key_id)

    async def _key(
        self,
        tenant_id: str,
        secret: str | None,
        action: str,
        *,
        old: str = "",
        grace_s: float = 0.0,
    ) -> tuple[Key, str]:
        checked_name("id", tenant_id)
        if secret is None:
            secret = "lp-" + secrets.token_urlsafe(24)
        elif self.tenant_for_key(checked_secret(secret)) is not None:
            raise Conflict("secret: this key exists already; revoke it first")
        prefix, now = secret[: min(7, len(secret) // 2)], self._clock()
        key = Key(secrets.token_hex(8), TenantId(tenant_id), prefix, now)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        value = {"digest": digest, "prefix": key.prefix, "created": key.created}
        told = event(action, tenant_id, now, key=key.id, **({"old": old} if old else {}))
        ending = await self._ending(tenant_id, old, now + grace_s) if old and grace_s else b""
        done = await self._store.change(
            "key_write",
            [TENANTS, GENERATION, EVENTS, KEYS],
            [tenant_id, key.id, orjson.dumps(value), told, EVENTS_MAX, KEYS_MAX, old, ending],
        )
        if done == 0:
            raise _no_tenant(tenant_id)
        if done == -1:
            raise Conflict(f"The tenant {tenant_id!r} has {KEYS_MAX} keys; revoke one first.")
        if done == -2:
            raise _no_key(tenant_id, old)
        await self._read()
        return key, secret

    async def _ending(self, tenant_id: str, key_id: str, at: float) -> bytes:
        """The row of a key that ends then, or when it would have ended before."""
        [rows] = await self._store.hashes([KEYS])
        if (text := rows.get(f"{tenant_id}\n{key_id}")) is None:
            raise _no_key(tenant_id, key_id)
        row: dict[str, Any] = orjson.loads(text)
        row["expires"] = min(at, row.get("expires") or at)
        return orjson.dumps(row)

    async def _write(self, tenant: Tenant, action: str, *, expect_version: int) -> int:
        detail = asdict(tenant)
        told = {name: detail[name] for name in ("weight", "limits", "adapter_limits", "shadow")}
        told["models"] = detail["models"][:20]
        event_ = event(action, tenant.id, self._clock(), **told)
        return await self._row(TENANTS, tenant.id, encoded(tenant), expect_version, event_)


def _no_tenant(tenant_id: str) -> Missing:
    return Missing(f"There is no tenant {tenant_id!r}.")


def _no_key(tenant_id: str, key_id: str) -> Missing:
    return Missing(f"The tenant {tenant_id!r} has no key {key_id!r}.")
