"""A plain OpenAI server behind the gateway: what it lists, what it is sent, when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import served
from aiohttp import web
from scripted import until
from served import Pump, before, entry

from gateway.config import ReplicaEntry
from gateway.core.dispatcher import Dispatcher, ReplicaState
from shared.messages import Tier
from shared.settings import BadSettings, parse


class Server:
    """Lists `models`, answers every completion by naming the model, as it was asked."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "base", "max_model_len": 99}]}
        self.status = 200
        self.asked: list[str] = []

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._complete)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        self.port = site.port

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.models, status=self.status)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        model = (await request.json())["model"]
        self.asked.append(model)
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return web.json_response({"model": model, "choices": [], "usage": usage})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.stop()


@asynccontextmanager
async def polled(server: Server, **entry: Any) -> AsyncIterator[Pump]:
    async with served.polled(server.port, kind="openai", **entry) as (_, pump):
        yield pump


async def test_what_it_lists_and_what_is_configured_is_what_it_serves(server: Server) -> None:
    server.models = {
        "data": [
            {"id": "tuned", "parent": "big"},
            {"id": "big", "parent": None, "max_model_len": 4096},
        ]
    }
    async with polled(server, models=["quiet", "tuned"], capacity=7) as pump:
        await until(lambda: len(pump.reports) > 2)
    report = pump.reports[-1]
    assert (report.base, report.capacity, report.max_model_len) == ("big", 7, 4096)
    assert [state.adapter for state in report.adapters] == ["tuned", "quiet"]
    assert {state.tier for state in report.adapters} == {Tier.GPU}, "no load is ever expected"
    assert [one.seq for one in pump.reports] == list(range(1, len(pump.reports) + 1))


async def test_one_without_a_list_serves_what_is_configured(server: Server) -> None:
    server.status = 404
    async with polled(server, base="llama", models=["a"]) as pump:
        await until(lambda: pump.reports)
    assert pump.reports[0].base == "llama"
    assert [state.adapter for state in pump.reports[0].adapters] == ["a"]


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{"name": "x"}]}, [], "x", None])
async def test_an_answer_that_names_no_base_is_no_report(server: Server, models: Any) -> None:
    server.models = models
    async with polled(server) as pump:
        await asyncio.sleep(0.2)
    assert pump.reports == []


async def test_it_is_lost_when_it_refuses_and_back_when_it_answers(server: Server) -> None:
    async with polled(server) as pump:
        await until(lambda: pump.reports)
        server.status = 500
        await until(lambda: pump.lost == 1)
        server.status, before = 200, len(pump.reports)
        await until(lambda: len(pump.reports) > before)
        await server.stop()
        await until(lambda: pump.lost == 2)
        await server.start(server.port)
        before = len(pump.reports)
        await until(lambda: len(pump.reports) > before)


async def test_a_star_passes_every_name_on_and_echoes_it(
    server: Server, valkey_url: str, tmp_path: Path
) -> None:
    async with before(valkey_url, tmp_path, entry(server, kind="openai", models=["*"])) as it:
        for model in ("adapter-7", "base", "org/other:v2"):
            answer = await it.chat(model)
            assert answer.status_code == 200
            assert answer.json()["model"] == model
            assert answer.headers["x-loraplex-placement"] == "home"
        assert server.asked == ["adapter-7", "base", "org/other:v2"]
        listed = (await it.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["base"]
        assert {row["adapter"] for row in await it.usage()} == set(server.asked)


async def test_without_a_star_an_unknown_name_is_the_tenants_404(
    server: Server, valkey_url: str, tmp_path: Path
) -> None:
    async with before(valkey_url, tmp_path, entry(server, kind="openai", models=["known"])) as it:
        assert (await it.chat("known")).status_code == 200
        assert (await it.chat("unknown")).status_code == 404
        assert server.asked == ["known"]
        dispatcher: Dispatcher = it.gateway.pump.dispatcher
        (view,) = dispatcher.view(it.gateway.pump.clock())
        assert view.state is ReplicaState.UP


def test_a_kind_that_is_none_is_refused() -> None:
    with pytest.raises(BadSettings, match="kind"):
        parse(ReplicaEntry, {"id": "a", "url": "http://x", "kind": "other"}, origin="test")
