"""The admin API's part about the bill: usage, records, prices, reconciliation, and audit events."""

from __future__ import annotations

import re
from typing import Any, Final

from aiohttp import web

from gateway.admin.call import Route, answer, iso, listed, moment, nothing, number, parsed
from gateway.state.audit import EVENTS, shown
from gateway.state.ledger import Ledger
from gateway.state.prices import Price, checked_price
from gateway.state.reconcile import Reconciler
from gateway.state.registry import Registry
from gateway.state.tenants import BadField
from shared.clock import Clock

_DAY_S: Final = 86_400.0
_PAGE_MAX: Final = 5000
_ENTRY_ID: Final = re.compile(r"[0-9]{1,15}-[0-9]{1,15}")


class Bills:
    def __init__(
        self, registry: Registry, ledger: Ledger, reconciler: Reconciler, wall: Clock
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._reconciler = reconciler
        self._wall = wall

    def routes(self) -> list[Route]:
        return [
            ("GET", "usage", self.usage),
            ("GET", "usage/records", self.records),
            ("POST", "usage/trim", self.trim),
            ("GET", "usage/reconcile", self.reconcile),
            ("GET", "prices", self.prices),
            ("PUT", r"prices/{tenant}/{model:[\s\S]+}", self.price_set),
            ("DELETE", r"prices/{tenant}/{model:[\s\S]+}", self.price_delete),
            ("GET", "events", self.events),
        ]

    # usage

    async def usage(self, request: web.Request) -> web.StreamResponse:
        start, end = self._window(request)
        by = tuple(name for name in request.query.get("by", "tenant").split(",") if name)
        rows = await self._ledger.usage(start, end, by)
        return answer({"from": iso(start), "to": iso(end), "by": by, "data": rows})

    async def records(self, request: web.Request) -> web.StreamResponse:
        """One a request, in pages: `next` is what `after` takes for the next one."""
        start, end = self._window(request)
        most = number(request, "limit", default=1000, most=_PAGE_MAX)
        rows, after = await self._ledger.records(
            start, end, after=_entry(request.query.get("after"), "after"), most=most
        )
        return answer({"object": "list", "data": rows, "next": after or None})

    async def trim(self, request: web.Request) -> web.StreamResponse:
        """Records that were exported need not be kept twice; the sums of their hours stay."""
        through = (await parsed(request, ("through",))).get("through", "")
        if not isinstance(through, str):
            raise BadField("through", "must be the id of the last record that was exported")
        trimmed = await self._ledger.trim(_entry(through, "through"))
        return answer({"trimmed": trimmed, "through": through})

    async def reconcile(self, request: web.Request) -> web.StreamResponse:
        return listed(await self._reconciler.rows())

    def _window(self, request: web.Request) -> tuple[float, float]:
        end = moment(request, "to", default=self._wall())
        return moment(request, "from", default=max(0.0, end - _DAY_S)), end

    # prices

    async def prices(self, request: web.Request) -> web.StreamResponse:
        return listed([_price_row(*row) for row in self._registry.prices()])

    async def price_set(self, request: web.Request) -> web.StreamResponse:
        price = checked_price(await parsed(request, ("input", "cached_input", "output")))
        tenant, model = request.match_info["tenant"], request.match_info["model"]
        version = await self._registry.price_set(tenant, model, price)
        return answer(_price_row(tenant, model, price, version), etag=version)

    async def price_delete(self, request: web.Request) -> web.StreamResponse:
        tenant, model = request.match_info["tenant"], request.match_info["model"]
        await self._registry.price_delete(tenant, model)
        return nothing()

    # events

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Newest first; with `after`, what came since that one, oldest first."""
        after = _entry(request.query.get("after"), "after")
        most = number(request, "limit", default=100, most=_PAGE_MAX)
        found = await self._registry.events(EVENTS, after=after, most=most)
        return listed([shown(*entry) for entry in found])


def _price_row(tenant: str, model: str, price: Price, version: int) -> dict[str, Any]:
    return {"tenant": tenant, "model": model, **price.row(), "version": version}


def _entry(text: str | None, param: str) -> str:
    """ "" when it is not given."""
    if text is not None and not _ENTRY_ID.fullmatch(text):
        raise BadField(param, "must be the `id` of an entry, such as 1700000000000-0")
    return text or ""
