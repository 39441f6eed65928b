"""How a replica announces itself: again within each lease, patiently, and once that it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import replica.joining
from replica.config import ReplicaConfig
from replica.joining import Joining
from shared import tasks
from shared.wire import FLEET_TOKEN, JOIN_PATH


class Gateway:
    """Says yes, or what `refuses` holds."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, str]] = []
        self.refuses: web.Response | None = None
        self.lease_s: Any = 0.15

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else dict(request.query)
        token = request.headers.get(FLEET_TOKEN, "")
        self.asked.append((request.method, request.path, body, token))
        if request.method == "DELETE":
            return web.Response(status=204)
        refusal, self.refuses = self.refuses, None
        return refusal or web.json_response({"lease_s": self.lease_s})


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[Joining]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    url = f"http://127.0.0.1:{port}/"
    yield Joining(gateway=url, token="t", name="gpu/7", url="http://me:1")
    await runner.cleanup()


async def test_it_renews_three_times_a_lease_and_leaves_by_name_and_address() -> None:
    gateway = Gateway()
    async with serving(gateway) as joining:
        task = tasks.spawn(joining.run(), name="join")
        async with asyncio.timeout(5):
            while len(gateway.asked) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await tasks.stop(task)
        entry = {"id": "gpu/7", "url": "http://me:1"}
        assert gateway.asked[:4] == [("POST", JOIN_PATH, entry, "t")] * 4
        await joining.leave()
        left = ("DELETE", f"{JOIN_PATH}/gpu/7", {"url": "http://me:1"}, "t")
        assert gateway.asked[-1] == left


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (web.json_response({"error": {"message": "the name is taken"}}, status=409), "is taken"),
        (web.Response(status=502, text="bad gateway"), "502"),
        (web.json_response({"lease": 3}), "no answer of a gateway"),
    ],
)
async def test_a_no_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: Any, said: str
) -> None:
    monkeypatch.setattr(replica.joining, "RETRY_S", 0.02)
    gateway = Gateway()
    gateway.refuses = refusal
    with caplog.at_level(logging.INFO, "replica.joining"):
        async with serving(gateway) as joining:
            task = tasks.spawn(joining.run(), name="join")
            async with asyncio.timeout(5):
                while len(gateway.asked) < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await tasks.stop(task)
    assert [record.getMessage() for record in caplog.records] == [
        "not joined; it is tried again",
        "joined",
    ]
    assert said in caplog.records[0].why  # type: ignore[attr-defined]


async def test_a_gateway_that_is_away_stops_nobody_from_leaving() -> None:
    joining = Joining(gateway="http://127.0.0.1:1", token="t", name="a", url="http://me:1")
    await joining.leave()


@pytest.mark.parametrize("url", ["gateway:8081", "ftp://gateway", "http://", "http://a b"])
def test_an_address_that_is_none_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ValueError, match="join"):
        ReplicaConfig(base=Path(), adapters=Path(), join=url)
