"""The admin API's part about adapters: where they are, and the registry's record of each.

What the fleet serves and what the registry knows are two things, shown in one row: an adapter can
be served without a record, and a record can wait for its adapter. A replica has two places of one
adapter when it was refused the version on record and keeps an older one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp import web

from gateway.admin.call import Route, answer, if_match, listed, nothing, parsed
from gateway.admin.rows import adapter_row
from gateway.core.dispatcher import Dispatcher, ReplicaView
from gateway.fleet.names import is_version
from gateway.state.adapter_records import AdapterRecord, checked_version
from gateway.state.registry import Registry
from gateway.state.tenants import BadField, Missing, checked_name
from shared.clock import Clock
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus

_FIELDS: Final = ("owner", "access")
Places = list[tuple[ReplicaView, AdapterState]]


class Adapters:
    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        refused: Callable[[ReplicaId], Mapping[AdapterId, AdapterState]],
        clock: Clock,
        wall: Clock,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._refused = refused
        self._clock = clock
        self._wall = wall

    def routes(self) -> list[Route]:
        return [
            ("GET", "adapters", self.all),
            ("POST", r"adapters/{adapter:[\s\S]+}/versions", self.add_version),
            ("POST", r"adapters/{adapter:[\s\S]+}/rollback", self.roll_back),
            ("GET", r"adapters/{adapter:[\s\S]+}", self.one),
            ("PATCH", r"adapters/{adapter:[\s\S]+}", self.change),
            ("DELETE", r"adapters/{adapter:[\s\S]+}", self.delete),
        ]

    async def all(self, request: web.Request) -> web.StreamResponse:
        places = self._places()
        names = places.keys() | {record.name for record in self._registry.adapters()}
        return listed([self._row(name, places.get(AdapterId(name), [])) for name in sorted(names)])

    async def one(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["adapter"]
        places, record = self._places().get(AdapterId(name), []), self._registry.adapter(name)
        if not places and record is None:
            raise Missing(f"No replica has an adapter {name!r}, and it has no record.")
        return answer(self._row(name, places), etag=record.version if record else None)

    async def change(self, request: web.Request) -> web.StreamResponse:
        """Its owner, and who may use it."""
        body = await parsed(request, _FIELDS)
        owner, access = body.get("owner"), body.get("access")
        if owner is not None and not isinstance(owner, str):
            raise BadField("owner", "must be a tenant's id; empty: the operator's")
        if access is not None and not isinstance(access, list):
            raise BadField("access", 'must be a list of tenants, or ["*"]')
        for tenant in access or ():
            checked_name("access", tenant)
        name, expected = request.match_info["adapter"], if_match(request)
        changed = await self._registry.adapter_set(
            name, owner=owner, access=access, expect_version=expected
        )
        return self._changed(changed)

    async def add_version(self, request: web.Request) -> web.StreamResponse:
        body = await parsed(request, ("digest", "path", "note"))
        version, expected = checked_version(body, self._wall()), if_match(request)
        name = request.match_info["adapter"]
        changed = await self._registry.adapter_version(name, version, expect_version=expected)
        return self._changed(changed, status=201)

    async def roll_back(self, request: web.Request) -> web.StreamResponse:
        digest = (await parsed(request, ("digest",))).get("digest", "")
        if not isinstance(digest, str):
            raise BadField("digest", "must be a string: the version to go to")
        name, expected = request.match_info["adapter"], if_match(request)
        return self._changed(
            await self._registry.adapter_switch(name, digest, expect_version=expected)
        )

    async def delete(self, request: web.Request) -> web.StreamResponse:
        """The record, and what servers hold by it; what they have of their own stays."""
        name, expected = request.match_info["adapter"], if_match(request)
        await self._registry.adapter_delete(name, expect_version=expected)
        return nothing()

    def _changed(self, record: AdapterRecord, *, status: int = 200) -> web.StreamResponse:
        places = self._places().get(AdapterId(record.name), [])
        row = adapter_row(record.name, places, record)
        return answer(row, status=status, etag=record.version)

    def _row(self, name: str, places: Places) -> dict[str, Any]:
        return adapter_row(name, places, self._registry.adapter(name))

    def _places(self) -> dict[AdapterId, Places]:
        found: dict[AdapterId, Places] = {}
        for view in self._dispatcher.view(self._clock()):
            told = {state.adapter: state for state in view.adapters}
            for state in told.values():
                found.setdefault(state.adapter, []).append((view, state))
            for adapter, failed in self._refused(view.replica).items():
                held = told.get(adapter)
                if held is None or _is_older(held, failed.digest):
                    found.setdefault(adapter, []).append((view, failed))
        return found


def _is_older(held: AdapterState, version: str) -> bool:
    """What is held serves, and is not what was refused."""
    return held.status is not AdapterStatus.FAILED and not is_version(held.digest, version)
