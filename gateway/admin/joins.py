"""The fleet's own call: a replica announces itself with the fleet token, renews that, and leaves.

Beside the admin API, on its port, but with another key: what a replica holds may say where it is,
and nothing else. The body is an entry of `fleet.replicas`, so whatever runs beside a server of
another make can join it: `{"id": "v1", "url": "http://10.0.0.2:8000", "kind": "vllm"}`. Types are
JSON's own: a number in quotes is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import orjson
from aiohttp import web
from pydantic import ValidationError

from gateway.admin.call import OF_THE_FLEET, answer, asked, guarded, nothing, parsed, refusal
from gateway.admin.join_schemas import NAME, URL
from gateway.config import ReplicaEntry
from gateway.discovery.joining import Joining
from gateway.edge.throttle import Throttle
from gateway.parts import upstream_of
from gateway.state.tenants import BadField, Conflict
from shared.ids import ReplicaId
from shared.settings import BadSettings
from shared.wire import JOIN_PATH

_NAME: Final = re.compile(NAME)
_URL: Final = re.compile(URL)
_OFF: Final = "Joining is off: set `fleet.token`, the same for gateways and replicas."


class Joins:
    def __init__(
        self, joining: Joining, *, lease_s: float, listed: Callable[[ReplicaId], bool]
    ) -> None:
        """`listed`: whether this gateway has the name from its file or from DNS."""
        self._joining = joining
        self._lease_s = lease_s
        self._listed = listed

    async def join(self, request: web.Request) -> web.StreamResponse:
        entry = _entry(await parsed(request, tuple(ReplicaEntry.model_fields)))
        if self._listed(ReplicaId(entry.id)):
            raise Conflict(
                f"{entry.id!r} is a replica of this gateway's file, or of its DNS: it need not "
                "join, and another one needs another name."
            )
        await self._joining.join(entry)
        return answer({"id": entry.id, "lease_s": self._lease_s})

    async def leave(self, request: web.Request) -> web.StreamResponse:
        name, url = request.match_info["replica"], asked(request, "url")
        _checked(name, url)
        await self._joining.leave(name, url)
        return nothing()


def add_join_routes(app: web.Application, joins: Joins, token: str, throttle: Throttle) -> None:
    """With an empty `token` they say how to get them."""
    for method, path, handler in (
        ("POST", JOIN_PATH, joins.join),
        ("DELETE", JOIN_PATH + "/{replica}", joins.leave),
    ):
        call = guarded(handler, token, throttle, OF_THE_FLEET) if token else _switched_off
        app.router.add_route(method, path, call)


async def _switched_off(request: web.Request) -> web.StreamResponse:
    return refusal(404, _OFF, code="join_off")


def _entry(body: dict[str, object]) -> ReplicaEntry:
    try:
        entry = ReplicaEntry.model_validate_json(orjson.dumps(body), strict=True)
        _checked(entry.id, entry.url)
        upstream_of(entry, connect_timeout_s=1)
    except ValidationError as error:
        fault = error.errors()[0]
        raise BadField(".".join(map(str, fault["loc"])) or "body", fault["msg"]) from None
    except BadSettings as error:
        raise BadField("url", str(error)) from None
    if entry.api_key:
        raise BadField("api_key", "is not kept in the store: list such a server in fleet.replicas")
    return entry


def _checked(name: str, url: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadField("id", "must be 1 to 128 printable ASCII characters, no space and no slash")
    if not _URL.fullmatch(url):
        raise BadField("url", "must be http://HOST:PORT in printable ASCII, no space and no @")
