"""A server of another make, scripted page by page, and a Polled that looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self

from aiohttp import web

from gateway.config import ReplicaEntry
from gateway.engines import ENGINES
from gateway.engines.polled import Polled
from gateway.parts import upstream_of
from gateway.state.adapter_records import AdapterRecord, AdapterVersion
from shared.ids import ReplicaId
from shared.messages import ReplicaReport

Reply = tuple[int, Any]


class Served:
    """Answers each path with what `pages` has for it (a value, or what makes one of the request's
    body): text as text, the rest as JSON. What it was sent is kept."""

    def __init__(self, pages: dict[str, Reply | Callable[[Any], Reply]]) -> None:
        self.pages = pages
        self.asked: list[tuple[str, Any]] = []
        self.keys: set[str | None] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = site.port

    async def stop(self) -> None:
        await self._runner.cleanup()

    def sent(self, path: str) -> list[Any]:
        return [body for where, body in self.asked if where == path]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.keys.add(request.headers.get("authorization"))
        if request.method == "POST":
            self.asked.append((request.path, body))
        page = self.pages.get(request.path, (404, {"detail": "Not Found"}))
        status, said = page(body) if callable(page) else page
        if isinstance(said, str):
            return web.Response(text=said, status=status)
        return web.json_response(said, status=status)


class Records:
    """Stands where the registry is."""

    loaded = True

    def __init__(self, *records: AdapterRecord) -> None:
        self.by_name = {record.name: record for record in records}

    def adapter(self, name: str) -> AdapterRecord | None:
        return self.by_name.get(name)

    def desired(self) -> Iterable[AdapterRecord]:
        return [one for one in self.by_name.values() if one.path]


def record(name: str, *versions: tuple[str, str]) -> AdapterRecord:
    """The last of (digest, path) is current."""
    held = tuple(AdapterVersion(digest, path) for digest, path in versions)
    return AdapterRecord(name, versions=held, current=held[-1].digest)


class Pump:
    """Stands where the gateway's pump is."""

    def __init__(self) -> None:
        self.reports: list[ReplicaReport] = []
        self.lost = 0

    def report(self, report: ReplicaReport) -> bool:
        self.reports.append(report)
        return True

    def replica_lost(self, replica: ReplicaId) -> None:
        self.lost += 1


@asynccontextmanager
async def polled(
    port: int, *records: AdapterRecord, kind: str, **entry: Any
) -> AsyncIterator[tuple[Polled, Pump]]:
    """Looks at it twenty times a second."""
    url, pump = f"http://127.0.0.1:{port}", Pump()
    its = ReplicaEntry.model_validate({"id": "one", "url": url, "kind": kind, **entry})
    upstream = upstream_of(its, connect_timeout_s=2)
    server = Polled(
        its,
        ENGINES[kind](),
        upstream,
        pump,  # type: ignore[arg-type]
        Records(*records),
        silence_heartbeats=20,
        poll_s=0.05,
    )
    task = asyncio.ensure_future(server.run())
    try:
        yield server, pump
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        upstream.close()
