"""Health, readiness, metrics, and the addresses that are none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted import BASE, ScriptedReplica, until

from gateway.state.tenants import Limits


def replica() -> ScriptedReplica:
    return ScriptedReplica("replica-0", adapters=("shout",))


async def test_ready_says_what_it_stands_on(fleet) -> None:
    async with fleet(replica()) as it:
        assert (await it.http.get("/healthz")).json() == {"status": "ok"}
        answer = await it.http.get("/readyz")
        detail = answer.json()
        assert answer.status_code == 200
        assert detail["ready"] is True
        assert detail["registry"] == {"loaded": True}
        assert detail["replicas"] == [{"id": "replica-0", "state": "up"}]
        assert detail["degraded"] == []


async def test_a_lost_fleet_is_not_ready_but_alive(fleet) -> None:
    one = replica()
    async with fleet(one) as it:
        await one.stop()
        await until(lambda: it.gateway.pump.dispatcher.view(0)[0].state == "lost")
        unready = await it.http.get("/readyz")
        assert unready.status_code == 503
        assert unready.json()["degraded"] == ["no_replica"]
        assert (await it.http.get("/healthz")).status_code == 200
        answer = await it.chat("shout")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


async def test_without_a_store_it_is_up_and_says_what_it_lacks(fleet) -> None:
    from gateway.app import Gateway
    from gateway.config import GatewayConfig

    config = GatewayConfig.model_validate(
        {
            "listen": {"port": 0},
            "store": {"url": "redis://127.0.0.1:1/0", "spool": "/dev/null/none"},
        }
    )
    gateway = Gateway(config)
    await gateway.start()
    async with fleet(replica()) as it:  # its client serves for both
        answer = await it.http.get(f"{gateway.url}/readyz")
        assert answer.status_code == 503
        assert "store_away" in answer.json()["degraded"]
        assert answer.json()["registry"] == {"loaded": False}
        refused = await it.http.post(f"{gateway.url}/v1/chat/completions", json={"model": BASE})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_starting")
    await gateway.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/v1/chat/completions", 405, "use POST"),
        ("DELETE", "/v1/models", 405, "use GET"),
        ("POST", "/v1/models/shout", 405, "use GET"),
        ("POST", "/v1/chat/completions/", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("GET", "/v1//models", 404, "did you mean /v1/models?"),
        ("POST", "/v1/embeddings", 404, "no POST /v1/embeddings."),
        ("GET", "/", 404, "no GET /."),
    ],
)
async def test_an_address_that_is_none_gets_an_openai_error_and_a_hint(
    fleet, method: str, path: str, status: int, says: str
) -> None:
    async with fleet(replica()) as it:
        answer = await it.http.request(method, path)
        assert answer.status_code == status
        assert says in answer.json()["error"]["message"]
        assert answer.headers["x-request-id"]
        assert ("allow" in answer.headers) == (status == 405)


def samples(text: str) -> dict[str, float]:
    return {
        f"{one.name}{sorted(one.labels.items())}": one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


async def test_every_declared_metric_moves(fleet) -> None:
    one = replica()
    async with fleet(one, limits=Limits(requests_per_min=3)) as it:
        answer = await it.http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        before = samples(answer.text)

        async def fails(request: Any, body: Any) -> Any:
            request.transport.abort()
            raise ConnectionResetError

        await it.chat("shout", stream=True)
        one.answer = fails
        await it.chat("shout")
        one.answer = None
        await until(lambda: it.gateway.pump.dispatcher.view(0)[0].state == "up")
        one.speak.clear()
        running = asyncio.ensure_future(it.chat(stream=True))
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 1)
        during = samples((await it.http.get("/metrics")).text)
        assert during["loraplex_gateway_in_flight[]"] == 1
        assert during["loraplex_gateway_replicas_up[]"] == 1
        one.speak.set()
        await running
        assert (await it.chat()).status_code == 429
        after = samples((await it.http.get("/metrics")).text)

    def moved(name: str, **labels: str) -> float:
        key = f"loraplex_gateway_{name}{sorted(labels.items())}"
        return after[key] - before.get(key, 0.0)

    shout = {"tenant": "acme", "adapter": "shout"}
    assert moved("requests_total", **shout, outcome="ok") == 1
    assert moved("requests_total", **shout, outcome="failed") == 1
    assert moved("requests_total", tenant="acme", adapter=BASE, outcome="refused") == 1
    assert moved("tokens_total", **shout, kind="prompt") == 7
    assert moved("tokens_total", **shout, kind="cached") == 2
    assert moved("tokens_total", **shout, kind="completion") == 4
    assert moved("rejects_total", reason="quota") == 1
    kinds = ("home", "warm", "spill", "cold")
    placed = f"loraplex_gateway_placements_total{[('kind', 'home')]}"
    assert sum(after.get(placed.replace("home", kind), 0) for kind in kinds) == 3
    assert moved("reports_total", replica="replica-0", result="applied") > 0
    for name in ("queue", "first_token", "request"):
        assert moved(f"{name}_seconds_count") >= 2
    assert after["loraplex_gateway_store_degraded[]"] == 0
    assert "loraplex_gateway_ledger_backlog_bytes[]" in after
    assert after["loraplex_gateway_queued[]"] == 0
