"""Orders of placement reach replicas, one at a time each, with the fleet's token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from scripted import until

from gateway.core.orders import Order
from gateway.edge.upstream import Upstream
from gateway.fleet.placing import Placer
from shared.ids import AdapterId, ReplicaId
from shared.messages import Tier

R0 = ReplicaId("replica-0")


class Ordered:
    """A replica that notes what it is told, and answers when it may."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[str]]] = []
        self.tokens: set[str | None] = set()
        self.may = asyncio.Event()
        self.may.set()
        self.status = 202
        self.at_once = 0

    async def prefetch(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        self.at_once += 1
        assert self.at_once == 1
        self.told.append((body["tier"], body["adapters"]))
        self.tokens.add(request.headers.get("x-loraplex-fleet-token"))
        await self.may.wait()
        self.at_once -= 1
        return web.json_response({}, status=self.status)


@pytest.fixture
async def replica() -> AsyncIterator[tuple[Ordered, Placer]]:
    ordered, app = Ordered(), web.Application()
    app.router.add_post("/prefetch", ordered.prefetch)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    upstream = Upstream(f"http://127.0.0.1:{port}", connect_timeout_s=1)
    placer = Placer({R0: upstream}, token="s3cret")
    yield ordered, placer
    await placer.close()
    upstream.close()
    await runner.cleanup()


def order(tier: Tier, *names: str) -> Order:
    return Order(R0, tier, tuple(map(AdapterId, names)))


async def test_an_order_is_posted_with_its_tier_and_the_token(replica: Any) -> None:
    ordered, placer = replica
    placer.carry_out(order(Tier.HOST, "a", "b"))
    await until(lambda: ordered.told)
    assert ordered.told == [("host", ["a", "b"])]
    assert ordered.tokens == {"s3cret"}


async def test_while_one_is_under_way_the_newest_of_each_tier_waits(replica: Any) -> None:
    ordered, placer = replica
    ordered.may.clear()
    placer.carry_out(order(Tier.HOST, "a"))
    await until(lambda: ordered.told)
    for name in ("b", "c", "d"):
        placer.carry_out(order(Tier.HOST, name))
    placer.carry_out(order(Tier.GPU, "a"))
    ordered.may.set()
    await until(lambda: len(ordered.told) == 3)
    await asyncio.sleep(0.02)
    assert ordered.told == [("host", ["a"]), ("host", ["d"]), ("gpu", ["a"])]


async def test_a_refused_order_is_said_in_the_log_and_not_repeated(
    replica: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ordered, placer = replica
    ordered.status = 404
    placer.carry_out(order(Tier.HOST, "gone"))
    await until(lambda: caplog.records)
    assert caplog.records[0].status == 404
    assert len(ordered.told) == 1


async def test_a_replica_that_is_away_or_unknown_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = Upstream("http://127.0.0.1:9", connect_timeout_s=0.2)
    placer = Placer({R0: away}, token="")
    placer.carry_out(order(Tier.HOST, "a"))
    placer.carry_out(Order(ReplicaId("nobody"), Tier.HOST, (AdapterId("a"),)))
    await until(lambda: caplog.records)
    await placer.close()
