"""Every declared metric moves, labels are bounded, and a client cannot make series."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from dns_server import SRV, DnsServer
from scripted import Fleet, ScriptedReplica, fleet_of, started, until
from stores import Relay

from gateway.metrics import LABELS_MAX, Metrics, Names
from gateway.state.tenants import Limits
from shared.messages import Tier, Usage
from shared.wire import PREFETCH_PATH


def test_the_first_names_keep_their_own_and_the_rest_share_one() -> None:
    names = Names(2)
    assert [names.of(name) for name in "abcab"] == ["a", "b", "other", "a", "b"]


def test_series_stay_bounded_whatever_comes() -> None:
    metrics = Metrics()
    for number in range(3 * LABELS_MAX):
        metrics.ended(
            f"t{number % 2}",
            f"a{number}",
            "ok",
            usage=Usage(1, 1),
            queue_s=0.0,
            first_token_s=None,
            total_s=0.1,
        )
    text = metrics.exposition()[0].decode()
    own = {line for line in text.splitlines() if line.startswith("loraplex_gateway_requests_total")}
    assert len(own) <= 4 * 2 * (LABELS_MAX + 1)
    assert 'adapter="other"' in text


async def test_an_unknown_model_makes_no_series(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        for number in range(5):
            assert (await it.chat(f"made-up-{number}")).status_code == 404
        text = (await it.http.get("/metrics")).text
        assert "made-up" not in text
        assert 'rejects_total{reason="model_not_found"} 5.0' in text


class Watched:
    """Which families have shown more than one value so far."""

    def __init__(self, it: Fleet) -> None:
        self._registry = it.gateway.metrics.registry
        self._first = self._now()
        self.moved: set[str] = set()

    def look(self) -> set[str]:
        """Those that have not moved yet."""
        now = self._now()
        for name, samples in now.items():
            if samples != self._first.get(name, {}):
                self.moved.add(name)
        return {name.removeprefix("loraplex_gateway_") for name in now.keys() - self.moved}

    def _now(self) -> dict[str, dict[Any, float]]:
        return {
            family.name: {
                (sample.name, *sorted(sample.labels.items())): sample.value
                for sample in family.samples
            }
            for family in self._registry.collect()
        }


def movers(tmp_path: Path) -> list[ScriptedReplica]:
    """Two that take orders, and have what they serve on disk."""

    async def taken(request: web.Request) -> web.Response:
        return web.json_response({}, status=202)

    return [
        ScriptedReplica(
            f"replica-{n}",
            ("tuned", "other"),
            capacity=1,
            heartbeat_s=0.1,
            tier=Tier.DISK,
            host_max=8,
            more=[web.post(PREFETCH_PATH, taken)],
        )
        for n in range(2)
    ]


async def failures_and_returns(it: Fleet, replicas: list[ScriptedReplica]) -> None:
    """Retries, one of them over the budget; an ejection, and its end."""
    view, clock = it.gateway.pump.dispatcher.view, it.gateway.pump.clock
    await until(lambda: [one.state for one in view(clock())] == ["up", "up"])
    home = (await it.chat("tuned")).headers["x-loraplex-replica"]
    (one,) = [replica for replica in replicas if replica.name == home]
    one.answer = one.resets
    for _ in range(2):  # a reset makes it suspect, until its next report
        await until(lambda: [one.state for one in view(clock())] == ["up", "up"])
        await it.chat("tuned")
    await until(lambda: any(one.state == "half_open" for one in view(clock())))
    one.answer = None
    for _ in range(3):
        await it.chat("tuned")


async def a_crowd(it: Fleet, replicas: list[ScriptedReplica], seen: Callable[[], set[str]]) -> None:
    """More requests of two tenants than there are places; one of them asks for much more."""
    await it.gateway.registry.create("globex", limits=Limits(), models=("*",))
    _, key = await it.gateway.registry.key_create("globex")
    await until(lambda: it.gateway.registry.tenant_for_key(key))
    for replica in replicas:
        replica.answer = replica.slow(0.1)
    other = httpx.AsyncClient(
        base_url=it.url, headers={"authorization": f"Bearer {key}"}, timeout=20, verify=False
    )
    asked = [it.chat("tuned", max_tokens=900) for _ in range(6)]
    asked += [replace(it, http=other).chat("tuned", max_tokens=10) for _ in range(12)]
    running = [asyncio.ensure_future(one) for one in asked]
    await until(lambda: not {"in_flight", "queued", "fairness_gap", "fairness_jain"} & seen())
    await asyncio.gather(*running)
    await other.aclose()


async def test_every_declared_metric_moves(
    valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fleet.fairness.WINDOW_S", 0.05)
    one, two = movers(tmp_path)
    async with (
        started(two),
        Relay(valkey_url, tmp_path / "relay") as relay,
        DnsServer() as dns,
    ):
        sections = {
            "placement": {"interval_s": 0.05},
            "health": {"failures": 2, "ejection_s": 0.2, "slow_start_s": 0},
            "forward": {"retry_share": 0, "retry_floor": 1},
            "queue": {"warm_wait_s": 0},
            "discovery": {
                "services": [{"srv": SRV}],
                "nameservers": [dns.address],
                "interval_s": 0.05,
                "members_max": 2,
            },
        }
        async with fleet_of(one, store=relay.url, spool=tmp_path, **sections) as it:
            watched = Watched(it)
            await it.chat("tuned", stream=True)
            await it.chat("nobody-has-it")
            await until(lambda: "orders" not in watched.look())
            dns.pods = {"replica-1": ("127.0.0.1", two.port), "replica-2": ("127.0.0.1", 1)}
            await until(lambda: not {"members", "replicas_not_taken"} & watched.look())
            await until(lambda: "placement_moves" not in watched.look())
            await failures_and_returns(it, [one, two])
            await a_crowd(it, [one, two], watched.look)
            await it.gateway.registry.set("acme", limits={"requests_per_min": 0})
            await until(lambda: it.gateway.registry.tenant("acme").limits.requests_per_min == 0)
            assert (await it.chat("tuned")).status_code == 429
            it.gateway.ledger._fresh.append(b"what is no record")
            it.gateway.ledger.spill()
            await until(lambda: "ledger_lost" not in watched.look())
            await relay.cut()
            await it.chat("tuned")
            await until(lambda: not watched.look())
            await relay.mend()
