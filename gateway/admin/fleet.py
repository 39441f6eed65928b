"""The admin API's part about replicas: what they are, taking one out, and why a placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from gateway.admin.call import Route, answer, asked, listed
from gateway.admin.rows import replica_row
from gateway.admin.tenants import named
from gateway.core.dispatcher import Base, Dispatcher, ReplicaView
from gateway.errors import ModelNotFound
from gateway.state.registry import Registry
from gateway.state.tenants import Missing
from shared.clock import Clock
from shared.ids import AdapterId, ReplicaId


class Fleet:
    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        changed: Callable[[], None],
        found_by: Callable[[ReplicaId], str],
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._changed = changed
        self._found_by = found_by
        self._clock = clock

    def routes(self) -> list[Route]:
        return [
            ("GET", "replicas", self.replicas),
            ("POST", "replicas/{replica}/drain", self.drain),
            ("POST", "replicas/{replica}/resume", self.resume),
            ("GET", "residency", self.residency),
            ("GET", "explain", self.explain),
        ]

    async def replicas(self, request: web.Request) -> web.StreamResponse:
        now = self._clock()
        return listed([self._row(view, now) for view in self._dispatcher.view(now)])

    async def residency(self, request: web.Request) -> web.StreamResponse:
        return listed(
            [
                {
                    "replica": view.replica,
                    "state": view.state,
                    "slots": view.slots,
                    "adapters": [asdict(state) for state in view.adapters],
                }
                for view in self._dispatcher.view(self._clock())
            ]
        )

    async def drain(self, request: web.Request) -> web.StreamResponse:
        return self._turned(request, self._dispatcher.leave)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        return self._turned(request, self._dispatcher.resume)

    def _turned(
        self, request: web.Request, turn: Callable[[ReplicaId, float], None]
    ) -> web.StreamResponse:
        replica, now = ReplicaId(request.match_info["replica"]), self._clock()
        turn(replica, now)
        self._changed()
        for view in self._dispatcher.view(now):
            if view.replica == replica:
                return answer(self._row(view, now))
        raise Missing(f"There is no replica {replica!r} in this gateway's fleet.")

    def _row(self, view: ReplicaView, now: float) -> dict[str, Any]:
        return replica_row(view, now) | {"found_by": self._found_by(view.replica)}

    async def explain(self, request: web.Request) -> web.StreamResponse:
        """Where a request would go now. A model the tenant may not use is as good as unknown."""
        tenant = named(self._registry, asked(request, "tenant"))
        model = asked(request, "model")
        if not (self._dispatcher.knows(model) and self._registry.may_use(tenant, model)):
            raise ModelNotFound(model)
        what = Base(model) if model in self._dispatcher.bases() else AdapterId(model)
        now = self._clock()
        choice = self._dispatcher.choice(what, now)
        return answer(
            {
                "tenant": tenant.id,
                "model": model,
                "chosen": None if choice is None else choice.replica,
                "owners": self._dispatcher.owners(AdapterId(model)),
                "candidates": [
                    {**asdict(one), "expected_s": one.expected_s, "refused": one.refused}
                    for one in self._dispatcher.explain(what, now)
                ],
            }
        )
