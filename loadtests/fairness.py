"""Is it fair? `python -m loadtests.fairness --out FILE`: simulated at scale, then live.

Live is a real gateway with its store, keys, quotas and ledger over real sockets, and an engine that
holds a place for as long as a model would (prefill, then a step a token). Three questions, asked of
both:

- how long a light tenant's first token takes beside a flood 64 deep in the queue, against alone;
- how exactly weights of 3 : 1 are kept over a minute;
- whether the gap of served / weight ever passes the VTC bound (loadtests/fair_simulation.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import orjson
import typer
import uvloop
from aiohttp import web

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.store.embedded import embedded
from loadtests.fair_simulation import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    Engine,
    Seen,
    Simulation,
    Tenant,
)
from loadtests.stats import percentile
from shared import tasks
from shared.clock import monotonic

DEEP: Final = 64  # requests of the flood that wait
LIGHT: Final = Tenant(name="light", depth=3, every_s=0.1, output=(4, 16))
ENGINE: Final = Engine(replicas=4, capacity=32, prefill_s=0.8, token_s=0.04)
SMALL: Final = Engine(replicas=1, capacity=16)
BASE: Final = "base"
_WEIGHED: Final = (Tenant(name="three", depth=40, weight=3), Tenant(name="one", depth=40))
_WARM_S: Final = 25.0  # replicas start slowly, and the first wave ends as one


def flood(engine: Engine) -> Tenant:
    return Tenant(name="flood", depth=engine.replicas * engine.capacity + DEEP)


def _p_ms(seen: Seen, q: float) -> float:
    return 1000 * percentile(sorted(seen.first_tokens_s), q)


def simulated(seed: int) -> dict[str, Any]:
    """The same questions in virtual time, and the bound among 200 tenants."""
    none = Tenant(name="none", depth=0)
    alone = Simulation([LIGHT, none], ENGINE, Random(seed)).run(600).tenants["light"]
    beside = Simulation([LIGHT, flood(ENGINE)], ENGINE, Random(seed)).run(600).tenants["light"]
    weighed = Simulation(_WEIGHED, SMALL, Random(seed)).run(60)
    dice = Random(seed)
    many = [
        Tenant(
            name=f"tenant-{n}",
            depth=dice.randint(2, 12),
            weight=dice.choice([1, 1, 2, 3, 5]),
            prompt=(10, dice.choice([100, 1000, 4000])),
            output=(1, dice.choice([32, 256, 1024])),
        )
        for n in range(200)
    ]
    crowd = Simulation(many, Engine(replicas=16), dice).run(120)
    return {
        "seed": seed,
        "engine": asdict(ENGINE),
        "light": _ratio(alone, beside),
        "weights": _shares(weighed.tenants["three"], weighed.tenants["one"]),
        "vtc": {
            "tenants": len(many),
            "samples": crowd.samples,
            "widest_gap": round(crowd.widest_gap),
            "bound": round(crowd.bound),
        },
    }


@dataclass
class Live:
    url: str
    keys: dict[str, str]
    seen: dict[str, Seen] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    async def ask(self, tenant: Tenant, dice: Random, until: float) -> None:
        """One request after the other, on one connection, until that time."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        seen = self.seen[tenant.name]
        while monotonic() < until:
            prompt, output = dice.randint(*tenant.prompt), dice.randint(*tenant.output)
            began = monotonic()
            writer.write(_request(self.keys[tenant.name], prompt, output, tenant.output[1]))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readuntil(b"data: {")  # after comments that keep it awake
            seen.first_tokens_s.append(monotonic() - began)
            await reader.readuntil(b"\r\n0\r\n\r\n")
            seen.served += INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * output
            self._sample()
            if tenant.every_s:
                await asyncio.sleep(dice.expovariate(1 / tenant.every_s))
        writer.close()

    def _sample(self) -> None:
        if self.seen.keys() == {one.name for one in _WEIGHED}:
            levels = [self.seen[one.name].served / one.weight for one in _WEIGHED]
            self.gaps.append(max(levels) - min(levels))


async def live(seed: int, seconds: float) -> dict[str, Any]:
    alone = (await _phase(ENGINE, [LIGHT], seed, seconds)).seen["light"]
    beside = (await _phase(ENGINE, [LIGHT, flood(ENGINE)], seed, seconds)).seen["light"]
    weighed = await _phase(SMALL, _WEIGHED, seed, seconds)
    held = SMALL.replicas * SMALL.capacity * _WEIGHED[0].output[1]
    return {
        "seconds": seconds,
        "engine": asdict(ENGINE),
        "light": _ratio(alone, beside),
        "weights": _shares(weighed.seen["three"], weighed.seen["one"]),
        "vtc": {
            "samples": len(weighed.gaps),
            "widest_gap": round(max(weighed.gaps)),
            "bound": round(2 * OUTPUT_WEIGHT * held),
        },
    }


async def _phase(
    engine: Engine, tenants: list[Tenant] | tuple[Tenant, ...], seed: int, seconds: float
) -> Live:
    async with _running(engine, tenants) as it:
        it.seen = {tenant.name: Seen() for tenant in tenants}
        until = monotonic() + _WARM_S + seconds
        asking = [
            tasks.spawn(it.ask(tenant, Random(f"{seed}/{tenant.name}/{n}"), until), name="client")
            for tenant in tenants
            for n in range(tenant.depth)
        ]
        await asyncio.sleep(_WARM_S)
        for seen in it.seen.values():
            seen.served = 0.0
            seen.first_tokens_s.clear()
        it.gaps.clear()
        await asyncio.sleep(max(0.0, until - monotonic()))
        await tasks.stop(*asking)
        return it


@asynccontextmanager
async def _running(engine: Engine, tenants: Any) -> AsyncIterator[Live]:
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="fair-")))
        store = held.enter_context(embedded(folder / "store"))
        runners, replicas = [], []
        for n in range(engine.replicas):
            runner = web.AppRunner(_engine(engine), access_log=None, shutdown_timeout=0.01)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            assert runner.addresses
            address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            replicas.append(
                {"id": f"r{n}", "url": address, "kind": "openai", "capacity": engine.capacity}
            )
            runners.append(runner)
        config = {
            "listen": {"port": 0},
            "store": {"url": store, "spool": folder / "spool", "timeout_s": 1},
            "queue": {"per_tenant_max": 1000},
            "fleet": {"replicas": replicas},
        }
        gateway = Gateway(GatewayConfig.model_validate(config))
        await gateway.start()
        keys = {}
        for tenant in tenants:
            await gateway.registry.create(tenant.name, weight=tenant.weight)
            _, keys[tenant.name] = await gateway.registry.key_create(tenant.name)
        while BASE not in gateway.pump.dispatcher.bases():  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.05)
        try:
            yield Live(gateway.url, keys)
        finally:
            await gateway.close()
            for runner in runners:
                await runner.cleanup()


def _engine(engine: Engine) -> web.Application:
    """Holds a place as long as a model would; tells of the first token, and then of all others."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": BASE, "object": "model"}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        prompt, output = map(int, body["messages"][0]["content"].split()[:2])
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        with contextlib.suppress(ConnectionError):  # whoever asked has left
            await tell(request, response, prompt, output)
        return response

    async def tell(
        request: web.Request, response: web.StreamResponse, prompt: int, output: int
    ) -> None:
        await response.prepare(request)
        await asyncio.sleep(engine.prefill_s)
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": BASE}
        delta = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
        await response.write(_event({**chunk, "choices": [delta]}))
        await asyncio.sleep(output * engine.token_s)
        usage = {"prompt_tokens": prompt, "completion_tokens": output}
        usage["total_tokens"] = prompt + output
        await response.write(_event({**chunk, "choices": [], "usage": usage}) + b"data: [DONE]\n\n")

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", complete)
    return app


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


def _request(key: str, prompt: int, output: int, most: int) -> bytes:
    text = f"{prompt} {output} ".ljust(4 * prompt, "x")
    body = orjson.dumps(
        {
            "model": BASE,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": most,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _ratio(alone: Seen, beside: Seen) -> dict[str, float]:
    first, second = _p_ms(alone, 99), _p_ms(beside, 99)
    return {
        "requests_alone": len(alone.first_tokens_s),
        "requests_beside": len(beside.first_tokens_s),
        "p50_alone_ms": round(_p_ms(alone, 50), 1),
        "p50_beside_ms": round(_p_ms(beside, 50), 1),
        "p99_alone_ms": round(first, 1),
        "p99_beside_ms": round(second, 1),
        "ratio": round(second / first, 3),
    }


def _shares(heavy: Seen, light: Seen) -> dict[str, float]:
    found = heavy.served / light.served
    return {"wanted": 3.0, "found": round(found, 3), "off_percent": round(100 * (found / 3 - 1), 2)}


def main(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the figures go, as JSON.")],
    seconds: Annotated[float, typer.Option(min=5, help="Of each live phase.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Of all dice.")] = 1,
) -> None:
    """Measure, print and write."""
    found = {"simulated": simulated(seed), "live": uvloop.run(live(seed, seconds))}
    out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    print(out.read_text(), end="")


if __name__ == "__main__":
    typer.run(main)
