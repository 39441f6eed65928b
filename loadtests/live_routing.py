"""Routing on a real fleet of tiny CPU replicas: `python -m loadtests.live_routing -o FILE`.

    hits       the same Zipf trace through the gateway, and straight to replicas drawn at random,
               each on a fresh fleet: how many requests needed no load into a slot
    join       a replica starts while requests run: its share afterwards, and how many cold requests
    drain      one is drained while requests run: how many cold requests, and that it ends idle
    kill       one is killed while requests run: how many requests failed

Requests are closed-loop (so many at once) and tiny: this measures decisions, not speed. A request
is cold when the gateway placed it where its adapter was on disk (`x-loraplex-placement`).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final

import httpx
import orjson
import typer

from loadtests.live_fleet import LiveFleet, Shape
from loadtests.recipe import Recipe, generate
from shared import tasks

_COLD: Final = ("cold", "spill")
_PROMPT: Final = "the"


@dataclass(slots=True)
class Seen:
    """What came of the requests of one phase."""

    placed: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.served.total() + len(self.failed)

    @property
    def cold(self) -> int:
        return sum(self.placed[kind] for kind in _COLD)

    def figures(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "cold": self.cold,
            "failed": len(self.failed),
            "placed": dict(sorted(self.placed.items())),
            "served": dict(sorted(self.served.items())),
        }


def asked(adapters: int, requests: int, seed: int) -> list[str]:
    """The adapters of a Zipf trace, in its order."""
    recipe = Recipe(seed=seed, arrivals=requests, adapters=adapters, skew=1.1)
    return [str(row.adapter) for row in generate(recipe)]


async def ask_all(
    url: str, key: str, models: Iterator[str], *, at_once: int, seen: Seen, tokens: int = 4
) -> None:
    """Through the gateway, `at_once` at a time, until the models end."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def worker(http: httpx.AsyncClient) -> None:
        for model in models:
            body = {"model": model, "prompt": _PROMPT, "max_tokens": tokens, "temperature": 0}
            try:
                reply = await http.post(f"{url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                seen.failed.append(f"{model}: {error!r}")
                continue
            if reply.status_code != 200:
                seen.failed.append(f"{model}: {reply.status_code} {reply.text}")
            else:
                seen.served[reply.headers.get("x-loraplex-replica", url)] += 1
                seen.placed[reply.headers.get("x-loraplex-placement", "direct")] += 1

    async with httpx.AsyncClient(headers=headers, timeout=60) as http:
        await asyncio.gather(*(worker(http) for _ in range(at_once)))


async def settled(fleet: LiveFleet, within_s: float = 60.0) -> None:
    """Every adapter is near on some replica that is up."""
    async with asyncio.timeout(within_s):
        while True:
            near: set[str] = set()
            for held in (await fleet.resident()).values():
                near |= {adapter for adapter, tier in held.items() if tier != "disk"}
            if near >= set(fleet.names):
                return
            await asyncio.sleep(0.3)


async def hits_through_gateway(shape: Shape, models: Sequence[str], at_once: int) -> float:
    with tempfile.TemporaryDirectory(prefix="routing-") as folder:
        async with LiveFleet(Path(folder), shape) as fleet:
            await settled(fleet)
            return await _hits(fleet, fleet.url, fleet.key, models, at_once, None)


async def hits_at_random(shape: Shape, models: Sequence[str], at_once: int, seed: int) -> float:
    with tempfile.TemporaryDirectory(prefix="routing-") as folder:
        async with LiveFleet(Path(folder), replace(shape, placement=False)) as fleet:
            return await _hits(fleet, "", "", models, at_once, Random(seed))


async def _hits(
    fleet: LiveFleet, url: str, key: str, models: Sequence[str], at_once: int, dice: Random | None
) -> float:
    """1 - loads into slots / requests."""
    before = [await fleet.loads(name) for name in fleet.urls]
    seen = Seen()
    if dice is None:
        await ask_all(url, key, iter(models), at_once=at_once, seen=seen)
    else:
        urls = list(fleet.urls.values())
        spread: dict[str, list[str]] = {one: [] for one in urls}
        for model in models:
            spread[urls[int(dice.random() * len(urls))]].append(model)
        each = max(1, at_once // len(urls))
        await asyncio.gather(
            *(ask_all(u, "", iter(names), at_once=each, seen=seen) for u, names in spread.items())
        )
    if seen.failed:
        raise RuntimeError(f"{len(seen.failed)} requests failed: {seen.failed[0]}")
    loads = sum([await fleet.loads(name) for name in fleet.urls]) - sum(before)
    return 1 - loads / seen.requests


async def changes(shape: Shape, models: Sequence[str], at_once: int) -> dict[str, Any]:
    """Join, drain and kill, one after the other, while requests run."""
    with tempfile.TemporaryDirectory(prefix="routing-") as folder:
        async with LiveFleet(Path(folder), replace(shape, later=1)) as fleet:
            await settled(fleet)
            join, drain, kill = (Seen() for _ in range(3))
            newcomer = f"replica-{shape.replicas}"
            async with _running(fleet, models, at_once, join):
                await fleet.start(newcomer)
                await _until(fleet, lambda rows: rows[newcomer]["state"] == "up")
                await _reached(lambda: join.served[newcomer], len(models) // 8)
            async with _running(fleet, models, at_once, drain):
                await fleet.drain("replica-0")
                await _until(fleet, lambda rows: rows["replica-0"]["state"] == "draining")
                before = drain.served["replica-0"]
                await _more(drain, len(models) // 4)
            late = drain.served["replica-0"] - before
            async with _running(fleet, models, at_once, kill):
                await _more(kill, len(models) // 8)
                fleet.kill("replica-1")
                await _until(fleet, lambda rows: rows["replica-1"]["state"] == "lost")
                await _more(kill, len(models) // 4)
            return {
                "join": {**join.figures(), "share": join.served[newcomer] / join.requests},
                "drain": {**drain.figures(), "served_after_it_drained": late},
                "kill": kill.figures(),
            }


@asynccontextmanager
async def _running(
    fleet: LiveFleet, models: Sequence[str], at_once: int, seen: Seen
) -> AsyncIterator[None]:
    """Requests run in the background, the trace over and over, while the body does something."""
    ended = False

    def stream() -> Iterator[str]:
        while True:
            for model in models:
                if ended:
                    return
                yield model

    work = ask_all(fleet.url, fleet.key, stream(), at_once=at_once, seen=seen)
    requests = tasks.spawn(work, name="requests")
    try:
        yield
    finally:
        ended = True
        await requests


async def _until(fleet: LiveFleet, true: Any, within_s: float = 90.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            if true(await fleet.states()):
                return
            await asyncio.sleep(0.1)


async def _reached(count: Callable[[], int], goal: int, within_s: float = 90.0) -> None:
    async with asyncio.timeout(within_s):
        while True:
            if count() >= goal:
                return
            await asyncio.sleep(0.05)


async def _more(seen: Seen, requests: int) -> None:
    await _reached(lambda: seen.requests, seen.requests + requests)


async def measure(shape: Shape, requests: int, at_once: int, seed: int) -> dict[str, Any]:
    models = asked(shape.adapters, requests, seed)
    ours = await hits_through_gateway(shape, models, at_once)
    random = await hits_at_random(shape, models, at_once, seed)
    told = await changes(shape, models, at_once)
    return {"requests": requests, "gpu_hits": {"loraplex": ours, "random": random}, **told}


def main(
    requests: Annotated[int, typer.Option(min=40, help="Of the trace.")] = 1200,
    at_once: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 6,
    seed: Annotated[int, typer.Option(help="Of the trace and of the random choice.")] = 1,
    output: Annotated[Path | None, typer.Option("-o", help="JSON file.")] = None,
) -> None:
    """Run all four on a fleet of 3 replicas with 32 adapters."""
    told = asyncio.run(measure(Shape(), requests, at_once, seed))
    told["command"] = (
        f"python -m loadtests.live_routing --requests {requests} --at-once {at_once} --seed {seed}"
    )
    data = orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    if output is not None:
        output.write_bytes(data)
    typer.echo(data)


if __name__ == "__main__":
    typer.run(main)
