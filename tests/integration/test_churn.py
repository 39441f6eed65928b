"""A replica on HTTP after a thousand adapters came and went, and clients left at every moment."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replica.app import Replica
from replica.config import ReplicaConfig
from replica.engine.adapter_store import AdapterFolder, HostAdapter
from replica.engine.tiny import tiny_adapter, tiny_model
from shared.ids import AdapterId

RANKS = {"ada": 1, "bob": 8, "cyd": 40, "dee": 16}
CYCLES, AT_ONCE, WARM_UP = 1000, 8, 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("churn")
    model = tiny_model(root / "base", context=1024)
    for seed, (name, rank) in enumerate(RANKS.items(), start=1):
        tiny_adapter(root / "adapters" / name, model, seed=seed, r=rank)
    return root


@asynccontextmanager
async def served(folder: Path, **settings: Any) -> AsyncIterator[tuple[Replica, str]]:
    defaults: dict[str, Any] = {
        "base": folder / "base",
        "adapters": folder / "adapters",
        "served_name": "tiny",
        "max_loras": 3,
        "threads": 1,
        "rescan_s": 60,
        "drain_s": 0.2,
        "report_interval_s": 0.01,
    }
    replica = Replica(ReplicaConfig.model_validate({**defaults, **settings}))
    try:
        yield replica, await replica.start()
    finally:
        await replica.stop()


async def idle(replica: Replica) -> None:
    """Nothing runs, waits or is held, and the core agrees."""
    engine, front = replica.engine, replica.front
    async with asyncio.timeout(10):
        while (  # noqa: ASYNC110 (what is waited for is another thread's)
            front._generations
            or engine.scheduler.running + engine.scheduler.waiting
            or front.report.running + front.report.waiting
        ):
            await asyncio.sleep(0.01)
    engine.scheduler.check()
    assert all(state.running == 0 for state in engine.cache.states())
    assert engine.pool.available + engine.cache.pages_used == engine.pool.pages


async def pages(http: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """The gauge of pages, by use."""
    async with http.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    name = "loraplex_replica_pages{"
    samples = (line.removeprefix(name).split("} ") for line in lines if line.startswith(name))
    return {use.split('"')[1]: int(float(value)) for use, value in samples}


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_thousand_adapters_come_are_used_and_go_and_all_is_as_before(folder: Path) -> None:
    async with served(folder) as (replica, url), aiohttp.ClientSession() as http:

        async def post(path: str, body: dict[str, Any]) -> Any:
            async with http.post(url + path, json=body) as reply:
                assert reply.status == 200, await reply.text()
                return await reply.text()

        async def cycle(number: int) -> None:
            name, path = f"x{number}", random.Random(number).choice(sorted(RANKS))
            await post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
            body = {"model": name, "prompt": f"number {number}", "max_tokens": 2}
            await post("/v1/completions", body)
            await post("/v1/unload_lora_adapter", {"lora_name": name})
            async with http.post(f"{url}/v1/completions", json=body) as gone:
                assert gone.status == 404

        async def cycles(numbers: range) -> None:
            places = asyncio.Semaphore(AT_ONCE)

            async def one(number: int) -> None:
                async with places:
                    await cycle(number)

            await asyncio.gather(*map(one, numbers))
            await idle(replica)

        before = await pages(http, url)
        assert before["free"] == replica.engine.pool.pages
        await cycles(range(WARM_UP))
        memory = resident_bytes()
        await cycles(range(WARM_UP, CYCLES))
        after = await pages(http, url)
        assert (after["kv"], after["adapter"]) == (0, 0)
        assert after["free"] + after["cached"] == before["free"]
        cache = replica.engine.cache
        assert (cache.slots_used, cache.pages_used, cache.host_used) == (0, 0, 0)
        assert {state.adapter for state in cache.states()} == RANKS.keys()
        assert resident_bytes() - memory < 16 << 20


async def test_clients_that_leave_at_any_moment_leave_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the queue, while their adapter loads, in prefill and while tokens come; alone or n = 4."""
    read = AdapterFolder.read

    def slow(store: AdapterFolder, adapter: AdapterId) -> HostAdapter:
        time.sleep(0.01)
        return read(store, adapter)

    monkeypatch.setattr(AdapterFolder, "read", slow)
    dice = random.Random(5)
    left: Counter[str] = Counter()
    tight = {"max_loras": 2, "max_cpu_loras": 2, "pages": 64, "max_model_len": 512}
    limits = {"max_running": 6, "max_step_tokens": 32, "choices_max": 8}
    async with served(folder, **tight, **limits) as (replica, url), aiohttp.ClientSession() as http:

        async def client(number: int) -> None:
            body = {
                "model": dice.choice(["tiny", *RANKS]),
                "prompt": dice.choice(["shared " * 12, f"own {number} " * dice.randint(1, 12)]),
                "max_tokens": dice.randint(1, 60),
                "n": dice.choice([1, 1, 4]),
                "stream": dice.random() < 0.5,
                "ignore_eos": True,
            }
            stays = dice.random() < 0.2
            try:
                async with asyncio.timeout(None if stays else dice.uniform(0, 0.4)):
                    async with http.post(f"{url}/v1/completions", json=body) as reply:
                        assert reply.status == 200, await reply.text()
                        await reply.read()
                left["never"] += 1
            except TimeoutError:
                left["early"] += 1

        for _ in range(4):
            await asyncio.gather(*map(client, range(60)))
        await idle(replica)
        assert left["early"] > 60
        assert left["never"] >= 20
        counts = await pages(http, url)
        assert counts["kv"] == 0
        held = {name for name in RANKS if replica.engine.cache.slot_of(AdapterId(name)) is not None}
        assert counts["adapter"] == replica.engine.cache.pages_used
        assert len(held) == replica.engine.cache.slots_used <= 2
        texts = set()
        for _ in range(2):
            body = {"model": "bob", "prompt": "shared " * 12, "max_tokens": 8, "temperature": 0}
            async with http.post(f"{url}/v1/completions", json=body) as reply:
                texts.add((await reply.json())["choices"][0]["text"])
        assert len(texts) == 1
