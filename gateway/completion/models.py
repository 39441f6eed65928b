"""`/v1/models`: what the caller's tenant may use of what the fleet can serve now.

Many clients ask this as their health check, so it is answered from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from secrets import token_hex
from typing import Any

import orjson
from aiohttp import web

from gateway.completion.auth import Door
from gateway.core.dispatcher import Dispatcher
from gateway.edge.framework import header_of, respond
from gateway.errors import GatewayError, ModelNotFound
from gateway.state.registry import Registry
from gateway.state.tenants import Tenant
from shared.clock import wall
from shared.wire import REQUEST_ID


class Models:
    def __init__(self, registry: Registry, dispatcher: Dispatcher, door: Door) -> None:
        self._registry = registry
        self._door = door
        self._dispatcher = dispatcher
        self._created = int(wall())

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self.listing, allow_head=False)
        app.router.add_get("/v1/models/{id:.+}", self.one, allow_head=False)

    async def listing(self, request: web.Request) -> web.StreamResponse:
        return self._answer(
            request, lambda tenant: {"object": "list", "data": list(self._cards(tenant))}
        )

    async def one(self, request: web.Request) -> web.StreamResponse:
        """The id may hold `/` and `:`, as they are or escaped."""
        return self._answer(request, lambda tenant: self._card(tenant, request.match_info["id"]))

    def _answer(
        self, request: web.Request, answer: Callable[[Tenant], dict[str, Any]]
    ) -> web.StreamResponse:
        headers = {REQUEST_ID: f"req_{token_hex(16)}"}
        try:
            tenant = self._door.admit(header_of(request), lambda: request.remote or "")
            body = orjson.dumps(answer(tenant))
        except GatewayError as error:
            return respond(error, headers)
        return web.Response(body=body, headers=headers, content_type="application/json")

    def _card(self, tenant: Tenant, model: str) -> dict[str, Any]:
        for card in self._cards(tenant):
            if card["id"] == model:
                return card
        raise ModelNotFound(model)

    def _cards(self, tenant: Tenant) -> Iterator[dict[str, Any]]:
        bases = sorted(self._dispatcher.bases())
        parents: dict[str, str | None] = dict.fromkeys(bases)
        if bases:
            parents |= dict.fromkeys(sorted(self._dispatcher.adapters()), bases[0])
        for name, parent in parents.items():
            if self._registry.may_use(tenant, name):
                yield {
                    "id": name,
                    "object": "model",
                    "created": self._created,
                    "owned_by": "loraplex",
                    "root": parent or name,
                    "parent": parent,
                }
