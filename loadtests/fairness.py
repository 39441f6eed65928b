"""Is it fair? `python -m loadtests.fairness --out FILE`: simulated at scale, then live.

Live is a real gateway with its store, keys, quotas and ledger over real sockets, and in a process
of their own servers that hold a place as long as a model would (loadtests/placed_server.py). Three
questions, asked of both:

- how long a light tenant's first token takes beside a flood 64 deep in the queue, against alone;
- how exactly weights of 3 : 1 are kept;
- whether the gap of served / weight ever passes the VTC bound (loadtests/fair_simulation.py).

The simulator (loadtests/fair_trial.py) also says what it would be with no places kept for the light
tenant (gateway/core/reserve.py), what they cost the flood, and how it is beside several floods.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import orjson
import typer
import uvloop

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.store.embedded import embedded
from loadtests.fair_setting import ENGINES, LIGHT, SMALL, WEIGHED, flood
from loadtests.fair_simulation import (
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    Seen,
    Tenant,
)
from loadtests.fair_trial import ratio, shares, simulated
from loadtests.placed_server import MODEL
from loadtests.places import Engine
from shared import tasks
from shared.clock import monotonic

_WARM_S: Final = 25.0  # replicas start slowly, and the first wave ends as one
_WARM_ALONE_S: Final = 5.0


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
        if self.seen.keys() == {one.name for one in WEIGHED}:
            levels = [self.seen[one.name].served / one.weight for one in WEIGHED]
            self.gaps.append(max(levels) - min(levels))


async def live(names: list[str], seed: int, seconds: float) -> dict[str, Any]:
    lights = {}
    for name in names:
        engine = ENGINES[name]
        alone = await _phase(engine, [LIGHT], seed, seconds, warm_s=_WARM_ALONE_S)
        beside = await _phase(engine, [LIGHT, flood(engine)], seed, seconds)
        found = ratio(alone.seen["light"], beside.seen["light"])
        lights[name] = {"engine": asdict(engine), "with_reserve": found}
    weighed = await _phase(SMALL, WEIGHED, seed, seconds)
    one = WEIGHED[0]
    held = SMALL.replicas * SMALL.capacity * (one.prompt[1] + one.output[1])
    return {
        "seconds": seconds,
        "light": lights,
        "weights": shares(weighed.seen["three"], weighed.seen["one"]),
        "vtc": {
            "samples": len(weighed.gaps),
            "widest_gap": round(max(weighed.gaps)),
            "bound": round(2 * OUTPUT_WEIGHT * held),
        },
    }


async def _phase(
    engine: Engine,
    tenants: Sequence[Tenant],
    seed: int,
    seconds: float,
    *,
    warm_s: float = _WARM_S,
) -> Live:
    async with _running(engine, tenants) as it:
        it.seen = {tenant.name: Seen() for tenant in tenants}
        until = monotonic() + warm_s + seconds
        asking = [
            tasks.spawn(it.ask(tenant, Random(f"{seed}/{tenant.name}/{n}"), until), name="client")
            for tenant in tenants
            for n in range(tenant.depth)
        ]
        await asyncio.sleep(warm_s)
        for seen in it.seen.values():
            seen.served = 0.0
            seen.first_tokens_s.clear()
        it.gaps.clear()
        await asyncio.sleep(max(0.0, until - monotonic()))
        await tasks.stop(*asking)
        return it


@asynccontextmanager
async def _running(engine: Engine, tenants: Sequence[Tenant]) -> AsyncIterator[Live]:
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="fair-")))
        store = held.enter_context(embedded(folder / "store"))
        urls = await held.enter_async_context(_servers(engine))
        config = {
            "listen": {"port": 0},
            "store": {"url": store, "spool": folder / "spool", "timeout_s": 1},
            "queue": {"per_tenant_max": 1000},
            "fleet": {
                "replicas": [
                    {"id": f"r{n}", "url": url, "kind": "openai", "capacity": engine.capacity}
                    for n, url in enumerate(urls)
                ]
            },
        }
        gateway = Gateway(GatewayConfig.model_validate(config))
        await gateway.start()
        held.push_async_callback(gateway.close)
        keys = {}
        for tenant in tenants:
            await gateway.registry.create(tenant.name, weight=tenant.weight)
            _, keys[tenant.name] = await gateway.registry.key_create(tenant.name)
        while MODEL not in gateway.pump.dispatcher.bases():  # noqa: ASYNC110  # it tells nobody
            await asyncio.sleep(0.05)
        yield Live(gateway.url, keys)


@asynccontextmanager
async def _servers(engine: Engine) -> AsyncIterator[list[str]]:
    """Their addresses."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(engine).items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loadtests.placed_server",
        *options,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        lines = [await process.stdout.readline() for _ in range(engine.replicas)]
        yield [line.decode().strip() for line in lines]
    finally:
        process.stdin.close()
        await process.wait()


def _request(key: str, prompt: int, output: int, most: int) -> bytes:
    text = f"{prompt} {output} ".ljust(4 * prompt, "x")
    body = orjson.dumps(
        {
            "model": MODEL,
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


def main(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the figures go, as JSON.")],
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Live; any of: {', '.join(ENGINES)}. None: the first."),
    ] = None,
    simulate: Annotated[bool, typer.Option(help="Simulate all of them first.")] = True,
    measure: Annotated[bool, typer.Option(help="Measure live.")] = True,
    seconds: Annotated[float, typer.Option(min=5, help="Of each live phase.")] = 45.0,
    seed: Annotated[int, typer.Option(help="Of all dice.")] = 1,
) -> None:
    """Measure, print and write."""
    names = engine or [next(iter(ENGINES))]
    if unknown := [name for name in names if name not in ENGINES]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of: {', '.join(ENGINES)}")
    found: dict[str, Any] = {"simulated": simulated(seed)} if simulate else {}
    if measure:
        found["live"] = uvloop.run(live(names, seed, seconds))
    out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2) + b"\n")
    print(out.read_text(), end="")


if __name__ == "__main__":
    typer.run(main)
