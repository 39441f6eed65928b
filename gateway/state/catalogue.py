"""Changes of adapters' records and of the price table: checked, versioned, told as events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any, Final

import orjson

from gateway.state.adapter_records import (
    AdapterRecord,
    AdapterVersion,
    added,
    checked_adapter,
    encoded_adapter,
    switched,
)
from gateway.state.audit import EVENTS, EVENTS_MAX, event
from gateway.state.follower import ADAPTERS, GENERATION, PRICES, Follower
from gateway.state.prices import ANY, Price
from gateway.state.tenants import Conflict, Missing, checked_name
from gateway.store.redis import Word

ATTEMPTS: Final = 5
_PRICES_MAX: Final = 10_000


class Catalogue(Follower):
    """Changes raise RegistryError or StoreAway."""

    # adapters

    async def adapter_set(
        self,
        name: str,
        *,
        owner: str | None = None,
        access: Iterable[str] | None = None,
        expect_version: int | None = None,
    ) -> AdapterRecord:
        """Change what is given and keep the rest; a record that is not there is made."""
        opened = None if access is None else tuple(access)

        def change(old: AdapterRecord) -> AdapterRecord:
            return replace(
                old,
                owner=old.owner if owner is None else owner,
                access=old.access if opened is None else opened,
            )

        return await self._change(name, change, "adapter.changed", expect_version)

    async def adapter_version(
        self, name: str, version: AdapterVersion, *, expect_version: int | None = None
    ) -> AdapterRecord:
        """Add a version, which the plain name means from now on."""
        return await self._change(
            name, lambda old: added(old, version), "adapter.version_added", expect_version
        )

    async def adapter_switch(
        self, name: str, digest: str = "", *, expect_version: int | None = None
    ) -> AdapterRecord:
        """Let the plain name mean a version it has; by default the one before: a rollback."""

        def change(old: AdapterRecord) -> AdapterRecord:
            if not old.version:
                raise _no_adapter(name)
            wanted = digest.removeprefix("sha256:").lower() or old.previous
            if not wanted:
                raise Conflict(f"The adapter {name!r} has no earlier version to go back to.")
            if (held := old.held(wanted)) is None:
                raise Missing(f"The adapter {name!r} has no one version {wanted!r}.")
            return switched(old, held.digest)

        return await self._change(name, change, "adapter.switched", expect_version)

    async def adapter_delete(self, name: str, *, expect_version: int | None = None) -> None:
        """The record only: what replicas serve under the name is then open by `models` alone."""
        checked_name("adapter", name)
        await self._drop(ADAPTERS, name, _no_adapter(name), "adapter.deleted", expect_version)

    async def _change(
        self, name: str, change: Any, action: str, expect_version: int | None
    ) -> AdapterRecord:
        for _ in range(ATTEMPTS):
            await self._read()
            old = self.adapter(name) or AdapterRecord(name, created=self._clock())
            if expect_version not in (None, old.version):
                raise stale(f"adapter {name!r}", old.version)
            new: AdapterRecord = checked_adapter(change(old))
            if old.version and new == old:
                return old
            told = event(action, name, self._clock(), owner=new.owner, current=new.current)
            version = await self._row(ADAPTERS, name, encoded_adapter(new), old.version, told)
            if version > 0:
                return replace(new, version=version)
        raise Conflict(f"The adapter {name!r} is being changed by others; try again.")

    # prices

    async def price_set(self, tenant: str, model: str, price: Price) -> int:
        """Of tokens from now on; ANY stands for every tenant or every model. The new version."""
        for param, name in (("tenant", tenant), ("model", model)):
            checked_name(param, name)
        if tenant != ANY and self.tenant(tenant) is None:
            raise Missing(f"There is no tenant {tenant!r}.")
        for _ in range(ATTEMPTS):
            await self._read()
            old = self._now.price_versions.get((tenant, model), 0)
            if not old and len(self._now.prices) >= _PRICES_MAX:
                raise Conflict(f"There are {_PRICES_MAX} prices; delete one first.")
            told = event("price.changed", f"{tenant} {model}", self._clock(), **price.row())
            body = orjson.dumps(asdict(price))
            version = await self._row(PRICES, f"{tenant}\n{model}", body, old, told)
            if version > 0:
                return version
        raise Conflict("This price is being changed by others; try again.")

    async def price_delete(self, tenant: str, model: str) -> None:
        missing = Missing(f"There is no price for tenant {tenant!r} and model {model!r}.")
        for param, name in (("tenant", tenant), ("model", model)):
            checked_name(param, name)
        await self._drop(PRICES, f"{tenant}\n{model}", missing, "price.deleted", None)

    # events

    async def events(
        self, stream: str, *, after: str, most: int
    ) -> list[tuple[str, dict[str, str]]]:
        """Newest first; with `after`, what came since that one, oldest first. Raises StoreAway."""
        return await self._store.entries(stream, after=after, most=most, newest=not after)

    # rows

    async def _row(self, rows: str, name: str, body: bytes, expected: int, told: bytes) -> int:
        words: list[Word] = [name, body, expected, told, EVENTS_MAX]
        done: int = await self._store.change("row_write", [rows, GENERATION, EVENTS], words)
        await self._read()
        return done

    async def _drop(
        self, rows: str, name: str, missing: Missing, action: str, expected: int | None
    ) -> None:
        told = event(action, name.replace("\n", " "), self._clock())
        words: list[Word] = [name, expected or 0, told, EVENTS_MAX]
        done = await self._store.change("row_delete", [rows, GENERATION, EVENTS], words)
        await self._read()
        if done < 0:
            raise stale(f"{action.partition('.')[0]} {name!r}", -done)
        if done == 0:
            raise missing


def stale(what: str, version: int) -> Conflict:
    return Conflict(f"The {what} has version {version} now; read it and try again.")


def _no_adapter(name: str) -> Missing:
    return Missing(f"There is no record of an adapter {name!r}.")
