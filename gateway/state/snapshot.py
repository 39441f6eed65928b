"""The registry as a request asks it: rows of the store, decoded once a generation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import orjson

from gateway.state.adapter_records import AdapterRecord, decoded_adapter
from gateway.state.prices import Price
from gateway.state.tenants import Key, Tenant, decoded
from shared.ids import TenantId

_log = logging.getLogger(__name__)

_ROWS_A_TURN: Final = 500  # decoded before other tasks get the loop: about 3 ms


@dataclass(frozen=True, slots=True)
class Snapshot:
    generation: int = -1
    tenants: dict[str, Tenant] = field(default_factory=dict)
    models: dict[str, frozenset[str]] = field(default_factory=dict)
    """By tenant: a list of thousands costs a request no search."""
    keys: dict[str, tuple[Key, ...]] = field(default_factory=dict)
    """By tenant, oldest first."""
    by_digest: dict[str, Tenant] = field(default_factory=dict)
    expires: dict[str, float] = field(default_factory=dict)
    """By a key's digest: when it ends, wall seconds; few have an end."""
    adapters: dict[str, AdapterRecord] = field(default_factory=dict)
    prices: dict[tuple[str, str], Price] = field(default_factory=dict)
    price_versions: dict[tuple[str, str], int] = field(default_factory=dict)


async def snapshot_of(
    generation: int,
    tenants_raw: Mapping[str, str],
    keys_raw: Mapping[str, str],
    adapters_raw: Mapping[str, str],
    prices_raw: Mapping[str, str],
) -> Snapshot:
    """A row that cannot be read is reported and left out: it must not hide the others."""
    made = Snapshot(generation)
    keys: dict[str, list[Key]] = {}
    async for tenant_id, text in _rows(tenants_raw):
        with _reported(tenant_id):
            made.tenants[tenant_id] = tenant = decoded(tenant_id, text)
            made.models[tenant_id] = frozenset(tenant.models)
    async for name, text in _rows(keys_raw):
        with _reported(name):
            owner, key_id = name.split("\n")
            value = orjson.loads(text)
            made.by_digest[value["digest"]] = made.tenants[owner]
            expires = value.get("expires")
            if expires is not None:
                made.expires[value["digest"]] = expires
            key = Key(key_id, TenantId(owner), value["prefix"], value["created"], expires)
            keys.setdefault(owner, []).append(key)
    async for name, text in _rows(adapters_raw):
        with _reported(name):
            made.adapters[name] = decoded_adapter(name, text)
    async for name, text in _rows(prices_raw):
        with _reported(name):
            who, model = name.split("\n")
            version, _, body = text.partition(" ")
            made.prices[who, model] = Price(**orjson.loads(body))
            made.price_versions[who, model] = int(version)
    for owner, held in keys.items():
        made.keys[owner] = tuple(sorted(held, key=lambda key: (key.created, key.id)))
    return made


async def _rows(raw: Mapping[str, str]) -> AsyncIterator[tuple[str, str]]:
    """`items()`, letting others have the loop now and then."""
    for turn, row in enumerate(raw.items(), 1):
        yield row
        if turn % _ROWS_A_TURN == 0:
            await asyncio.sleep(0)


@contextmanager
def _reported(row: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        _log.error("registry row unreadable", extra={"row": row, "reason": repr(error)})
