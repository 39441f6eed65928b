"""A replica that does what a test tells it to, on a real socket, and a gateway in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import orjson
from aiohttp import web

from shared.clock import wall
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, ReplicaReport, Tier
from shared.wire import REPORTS_PATH, encode_report

Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]

BASE = "tiny"
WORDS = ("Hel", "lo ", "wörld", "!")
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def event(data: dict[str, Any] | str) -> bytes:
    text = data.encode() if isinstance(data, str) else orjson.dumps(data)
    return b"data: " + text + b"\n\n"


def chunk(model: str, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": model,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }


def chunks(model: str, words: tuple[str, ...] = WORDS) -> list[bytes]:
    """The events of one answer, without usage and `[DONE]`."""
    said = [event(chunk(model, {"content": word})) for word in words]
    return [event(chunk(model, {"role": "assistant"})), *said, event(chunk(model, {}, "stop"))]


def usage_event(model: str) -> bytes:
    return event({**chunk(model, {}), "choices": [], "usage": USAGE})


DONE = event("[DONE]")


@dataclass
class ScriptedReplica:
    """Speaks `/reports` and the OpenAI routes. `answer` may be replaced to misbehave."""

    name: str
    adapters: tuple[str, ...] = ()
    capacity: int = 8
    heartbeat_s: float = 0.4
    received: list[tuple[web.Request, dict[str, Any]]] = field(default_factory=list)
    left: list[float] = field(default_factory=list)  # loop times at which a client was gone
    answer: Answer | None = None
    reporting: bool = True
    draining: bool = False
    tier: Tier = Tier.HOST  # of its adapters
    host_max: int = 0  # places in host memory; 0: it takes no orders
    port: int = 0
    token: str = ""
    digests: dict[str, str] = field(default_factory=dict)  # of adapters, instead of a made-up one
    more: list[web.RouteDef] = field(default_factory=list)  # it answers as well

    def __post_init__(self) -> None:
        self._boot, self._seq = uuid4().hex, 0
        self._runner: web.AppRunner | None = None
        self._followers: set[Any] = set()  # connections that reports go to
        self.speak = asyncio.Event()
        self.speak.set()  # cleared: a stream waits before each further event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(REPORTS_PATH, self._reports)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_post("/v1/completions", self._completions)
        app.add_routes(self.more)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site.port

    async def stop(self) -> None:
        """From now on connections are refused and open ones are closed."""
        if self._runner is not None:
            for connection in self._runner.server.connections:
                if connection.transport is not None:  # else it is gone already
                    connection.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    async def refuse(self) -> None:
        """Connections are refused and the open ones close, but the reports go on."""
        assert self._runner is not None
        for site in [*self._runner.sites]:
            await site.stop()
        for connection in [*self._runner.server.connections]:
            if connection not in self._followers:
                connection.transport.abort()

    def reboot(self) -> None:
        """It is another process from now on, as far as its reports tell."""
        self._boot, self._seq = uuid4().hex, 0

    def report(self) -> ReplicaReport:
        self._seq += 1
        return ReplicaReport(
            replica=ReplicaId(self.name),
            boot=self._boot,
            seq=self._seq,
            base=BASE,
            slots=4,
            capacity=self.capacity,
            running=0,
            waiting=0,
            pages_total=100,
            pages_free=100,
            max_model_len=2048,
            heartbeat_s=self.heartbeat_s,
            draining=self.draining,
            host_max=self.host_max,
            adapters=tuple(
                AdapterState(AdapterId(name), self.digests.get(name, f"sha-{name}"), self.tier)
                for name in self.adapters
            ),
        )

    async def _reports(self, request: web.Request) -> web.StreamResponse:
        if self.token and request.headers.get("x-loraplex-fleet-token") != self.token:
            raise web.HTTPForbidden
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        self._followers.add(request.protocol)
        while True:
            if self.reporting:
                await response.write(encode_report(self.report()))
            await asyncio.sleep(self.heartbeat_s / 2)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.received.append((request, body))
        try:
            return await (self.answer or self.well)(request, body)
        except asyncio.CancelledError:
            self.left.append(asyncio.get_running_loop().time())
            raise

    async def well(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        model = body["model"]
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(WORDS)}
            return web.json_response(
                {
                    "id": "chatcmpl-1",
                    "object": "chat.completion",
                    "created": 1,
                    "model": model,
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": USAGE,
                }
            )
        response = await self.begin(request)
        for one in chunks(model):
            await self.speak.wait()
            await response.write(one)
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(usage_event(model))
        await response.write(DONE)
        return response

    # Faults: values for `answer` -----------------------------------------------------------------

    async def freezes(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Takes the request and says nothing, ever."""
        await asyncio.Event().wait()
        raise AssertionError

    async def resets(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Closes early: before any byte of an answer."""
        assert request.transport is not None
        request.transport.abort()
        raise asyncio.CancelledError  # as a handler ends whose connection is gone

    async def raves(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.write(b"\x00\x01 nonsense\r\n\r\n")
        await asyncio.Event().wait()
        raise AssertionError

    async def dies_mid_stream(
        self, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        response = await self.begin(request)
        await response.write(b"".join(chunks(body["model"])[:3]))
        await asyncio.sleep(0.02)
        assert request.transport is not None
        request.transport.abort()
        return response

    def fails(self, status: int) -> Answer:
        """With an OpenAI error of that status."""

        async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no", "type": "x"}}, status=status)

        return answer

    def slow(self, by_s: float) -> Answer:
        async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(by_s)
            return await self.well(request, body)

        return answer

    async def begin(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        return response


@dataclass
class Fleet:
    """A running gateway, its replicas, and one tenant with a key."""

    gateway: Any
    replicas: list[ScriptedReplica]
    key: str
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return str(self.gateway.url)

    def sdk(self, key: str | None = None, retries: int = 0) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key or self.key,
            max_retries=retries,
            timeout=20,
            http_client=httpx.AsyncClient(verify=False),  # reading certificates stalls the loop
        )

    async def chat(self, model: str = BASE, **more: Any) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}
        return await self.http.post("/v1/chat/completions", json=body)

    async def usage(self) -> list[dict[str, Any]]:
        """Every ledger row so far, once it is in the store."""
        for _ in range(100):
            if self.gateway.ledger.backlog_bytes == 0:
                break
            await asyncio.sleep(0.02)
        now = wall()
        rows = await self.gateway.ledger.usage(now - 3600, now + 60, ("tenant", "adapter"))
        return list(rows)


async def read_reply(reader: asyncio.StreamReader) -> tuple[bytes, dict[bytes, bytes], list[bytes]]:
    """Status line, headers, and the chunks (or the one body) of a reply."""
    head = await reader.readuntil(b"\r\n\r\n")
    status, *lines = head[:-4].split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines)
    if b"content-length" in headers:
        return status, headers, [await reader.readexactly(int(headers[b"content-length"]))]
    if b"transfer-encoding" not in headers:
        return status, headers, [await reader.read()]
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return status, headers, parts


async def until(true: Callable[[], object], *, within_s: float = 5.0) -> None:
    """Wait for something that happens elsewhere."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.005)


@asynccontextmanager
async def started(*replicas: ScriptedReplica) -> AsyncIterator[None]:
    """They listen; afterwards they do not: uvloop waits for ever for a server left open."""
    async with AsyncExitStack() as stack:
        for replica in replicas:
            await replica.start()
            stack.push_async_callback(replica.stop)
        yield


@asynccontextmanager
async def fleet_of(
    *replicas: ScriptedReplica,
    store: str,
    spool: Path,
    limits: Any = None,
    models: tuple[str, ...] = ("*",),
    **sections: dict[str, Any],
) -> AsyncIterator[Fleet]:
    from gateway.app import Gateway
    from gateway.config import GatewayConfig
    from gateway.state.tenants import Limits

    async with AsyncExitStack() as stack:
        for replica in replicas:
            if replica.port == 0:
                await replica.start()
            stack.push_async_callback(replica.stop)
        config = GatewayConfig.model_validate(
            {
                "listen": {"port": 0, **sections.pop("listen", {})},
                "store": {
                    "url": store,
                    "prefix": f"t{uuid4().hex}:",
                    "timeout_s": 2,
                    "spool": spool / "spool",
                    **sections.pop("store", {}),
                },
                "fleet": {
                    "replicas": [{"id": one.name, "url": one.url} for one in replicas],
                    **sections.pop("fleet", {}),
                },
                **sections,
            }
        )
        gateway = Gateway(config)
        stack.push_async_callback(gateway.close)
        await gateway.start()
        await gateway.registry.create("acme", limits=limits or Limits(), models=models)
        _, key = await gateway.registry.key_create("acme")
        await until(lambda: gateway.registry.tenant_for_key(key))
        alive = [one.name for one in replicas if one.reporting]
        view = gateway.pump.dispatcher.view
        await until(
            lambda: (
                {one.replica for one in view(gateway.pump.clock()) if one.reported_at is not None}
                >= set(alive)
            )
        )
        http = await stack.enter_async_context(
            httpx.AsyncClient(
                base_url=gateway.url,
                headers={"authorization": f"Bearer {key}"},
                timeout=20,
                verify=False,
            )
        )
        yield Fleet(gateway, list(replicas), key, http)


@asynccontextmanager
async def second(it: Fleet, folder: Path, **fleet: Any) -> AsyncIterator[Any]:
    """Another gateway on the same store and replicas."""
    from gateway.app import Gateway
    from gateway.config import GatewayConfig

    config = {
        "listen": {"port": 0},
        "store": {
            "url": it.gateway._config.store.url,
            "prefix": it.gateway.store._prefix,
            "timeout_s": 2,
            "spool": folder / "second.spool",
        },
        "fleet": {
            "replicas": [{"id": one.name, "url": one.url} for one in it.replicas],
            **fleet,
        },
    }
    gateway = Gateway(GatewayConfig.model_validate(config))
    await gateway.start()
    dispatcher, clock = gateway.pump.dispatcher, gateway.pump.clock
    await until(lambda: all(one.reported_at is not None for one in dispatcher.view(clock())))
    try:
        yield gateway
    finally:
        await gateway.close()
