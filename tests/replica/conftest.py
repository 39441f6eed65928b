"""Whole replicas with a tiny random base and six adapters, on real sockets."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from s3_server import S3Server, s3_server

from replica.app import Replica
from replica.config import ReplicaConfig
from replica.engine.weights import tiny_adapter, tiny_model

ADAPTERS = {"ada": 4, "bob": 8, "cyd": 16, "dee": 2, "eve": 8, "fay": 4}  # name: rank


@dataclass(frozen=True, slots=True)
class Served:
    """One running replica and ways to talk to it."""

    replica: Replica
    url: str
    http: aiohttp.ClientSession
    sdk: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, headers=headers) as reply:
            json = reply.content_type == "application/json"
            return reply.status, await (reply.json() if json else reply.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as reply:
            json = reply.content_type == "application/json"
            return reply.status, await (reply.json() if json else reply.text())

    async def tokens(self, model: str, prompt: Any = "once", tokens: int = 12, **more: Any) -> str:
        """The text of one greedy completion; fails on anything but 200."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        status, reply = await self.post("/v1/completions", body)
        assert status == 200, reply
        text: str = reply["choices"][0]["text"]
        return text

    async def adapter(self, name: str) -> dict[str, Any]:
        _, listed = await self.get("/v1/adapters")
        [state] = [entry for entry in listed["data"] if entry["name"] == name]
        return dict(state)

    async def until(self, true: Callable[[], bool], within_s: float = 10) -> None:
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 (what is waited for is another thread's)
                await asyncio.sleep(0.005)

    async def idle(self, within_s: float = 5) -> None:
        """Nothing runs or waits, pages are free or of idle adapters, and the core agrees."""

        def is_idle() -> bool:
            report = self.replica.front.report
            held = any(state.running for state in report.adapters)
            # The report may be of just before: the pool is what it is now.
            free = engine.pool.available + engine.cache.pages_used == engine.pool.pages
            return free and report.running == report.waiting == 0 and not held

        engine = self.replica.engine
        await self.until(is_idle, within_s)
        engine.scheduler.check()


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base` and `adapters`; tests that change it copy it first."""
    root = tmp_path_factory.mktemp("tiny")
    model = tiny_model(root / "base", context=4096)
    for seed, (name, rank) in enumerate(ADAPTERS.items(), start=1):
        tiny_adapter(root / "adapters" / name, model, seed=seed, r=rank)
    return root


@pytest.fixture
def store(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the adapters that a test may change."""
    shutil.copytree(tiny / "adapters", tmp_path / "adapters")
    return tmp_path / "adapters"


@pytest.fixture
async def serve(tiny: Path) -> AsyncIterator[Serve]:
    """Start a replica with these settings over the defaults; all end with the test."""
    running: list[Served] = []

    async def start(**settings: Any) -> Served:
        defaults: dict[str, Any] = {
            "base": tiny / "base",
            "adapters": tiny / "adapters",
            "served_name": "tiny",
            "max_loras": 2,
            "threads": 1,
            "rescan_s": 60,
            "drain_s": 0.2,
        }
        replica = Replica(ReplicaConfig.model_validate({**defaults, **settings}))
        url = await replica.start()
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        served = Served(replica, url, aiohttp.ClientSession(), sdk)
        running.append(served)
        return served

    yield start
    for served in running:
        await served.sdk.close()
        await served.http.close()
        await served.replica.stop()
