"""A server of another make, scripted page by page, and a Polled or a gateway that looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx
from aiohttp import web
from scripted import Fleet, until

from gateway.app import Gateway
from gateway.config import GatewayConfig, ReplicaEntry
from gateway.engines import ENGINES
from gateway.engines.polled import Polled
from gateway.parts import upstream_of
from gateway.state.adapter_records import AdapterRecord, AdapterVersion
from shared.ids import ReplicaId
from shared.messages import ReplicaReport

Reply = tuple[int, Any]
Page = Reply | Callable[[Any], Reply | Awaitable[Reply]]


class Served:
    """Answers each path with what `pages` has for it: a value, or what makes one of the body, at
    once or later. Text is sent as text or as events, the rest as JSON; what came is kept."""

    def __init__(self, pages: dict[str, Page]) -> None:
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
        answer = page(body) if callable(page) else page
        status, said = await answer if isinstance(answer, Awaitable) else answer
        if isinstance(said, str):
            kind = "text/event-stream" if said.startswith("data:") else "text/plain"
            return web.Response(text=said, status=status, content_type=kind)
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


def entry(server: Any, **fields: Any) -> dict[str, Any]:
    """Of `fleet.replicas`, for what listens on `server.port`."""
    return {"id": f"at-{server.port}", "url": f"http://127.0.0.1:{server.port}", **fields}


@asynccontextmanager
async def before(store: str, folder: Path, *entries: dict[str, Any]) -> AsyncIterator[Fleet]:
    """A gateway of one tenant before these servers, once it has heard of each."""
    config = GatewayConfig.model_validate(
        {
            "listen": {"port": 0},
            "store": {"url": store, "prefix": f"t{uuid4().hex}:", "spool": folder / "spool"},
            "fleet": {"replicas": entries},
        }
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        await gateway.registry.create("acme")
        _, key = await gateway.registry.key_create("acme")
        await until(lambda: gateway.registry.tenant_for_key(key))
        serves = gateway.pump.dispatcher.serves
        await until(lambda: all(serves(ReplicaId(one["id"])) for one in entries))
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers, verify=False) as http:
            yield Fleet(gateway, [], key, http)
    finally:
        await gateway.close()
