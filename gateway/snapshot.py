"""The registry as a request asks it: rows of the store, decoded once a generation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import orjson

from gateway.tenants import Key, Tenant, decoded
from shared.ids import TenantId

_log = logging.getLogger(__name__)

_ROWS_A_TURN: Final = 500  # decoded before other tasks get the loop: about 3 ms


@dataclass(frozen=True, slots=True)
class Snapshot:
    generation: int
    tenants: dict[str, Tenant]
    models: dict[str, frozenset[str]]  # by tenant: a list of thousands costs a request no search
    keys: dict[str, tuple[Key, ...]]  # by tenant, oldest first
    by_digest: dict[str, Tenant]


async def snapshot_of(
    generation: int, tenants_raw: Mapping[str, str], keys_raw: Mapping[str, str]
) -> Snapshot:
    """A row that cannot be read is reported and left out: it must not hide the others."""
    tenants: dict[str, Tenant] = {}
    keys: dict[str, list[Key]] = {}
    by_digest: dict[str, Tenant] = {}
    for turn, (tenant_id, text) in enumerate(tenants_raw.items(), 1):
        with _reported(tenant_id):
            tenants[tenant_id] = decoded(tenant_id, text)
        if turn % _ROWS_A_TURN == 0:
            await asyncio.sleep(0)
    for turn, (field, text) in enumerate(keys_raw.items(), 1):
        with _reported(field):
            owner, key_id = field.split("\n")
            value = orjson.loads(text)
            by_digest[value["digest"]] = tenants[owner]
            key = Key(key_id, TenantId(owner), value["prefix"], value["created"])
            keys.setdefault(owner, []).append(key)
        if turn % _ROWS_A_TURN == 0:
            await asyncio.sleep(0)
    return Snapshot(
        generation=generation,
        tenants=tenants,
        models={tenant.id: frozenset(tenant.models) for tenant in tenants.values()},
        keys={
            owner: tuple(sorted(held, key=lambda key: (key.created, key.id)))
            for owner, held in keys.items()
        },
        by_digest=by_digest,
    )


@contextmanager
def _reported(row: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        _log.error("registry row unreadable", extra={"row": row, "reason": repr(error)})
