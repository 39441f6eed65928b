"""The store frozen, refused, slow, flushed, without scripts, absent at the start.

Each with a real Valkey behind a relay that can misbehave: a decision is bounded in time, is made
all the same, says that it is the gateway's own, and becomes exact again by itself.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
from scripted import ScriptedReplica
from stores import Relay

from gateway.config import QuotaConfig
from gateway.state.quota import Denied, Granted, Quota
from gateway.state.tenants import Limits, Tenant
from gateway.store.embedded import embedded
from gateway.store.redis import Store
from shared.ids import RequestId, TenantId

TIMEOUT_S = 0.05
BOUND_S = 0.3  # on a loaded test machine; tens of milliseconds on a quiet one


@pytest.fixture
async def relay(valkey_url: str, tmp_path: Path) -> AsyncIterator[Relay]:
    async with Relay(valkey_url, tmp_path / "r") as it:
        yield it


@pytest.fixture
async def store(relay: Relay) -> AsyncIterator[Store]:
    it = Store(relay.url, prefix=f"{uuid.uuid4().hex}:", timeout_s=TIMEOUT_S)
    await it.start()
    yield it
    await it.close()


def tenant(**limits: Any) -> Tenant:
    return Tenant(TenantId("t"), limits=Limits(**limits))


ALL = tenant(requests_per_min=8, tokens_per_min=8000, concurrency=8, tokens_per_day=8000)


async def admitted(quota: Quota, who: Tenant, calls: int) -> int:
    """Of so many at once; none may take longer than the bound."""
    began = time.monotonic()
    answers = await asyncio.gather(
        *[quota.reserve(who, RequestId(uuid.uuid4().hex), 10) for _ in range(calls)]
    )
    assert time.monotonic() - began < BOUND_S + TIMEOUT_S
    for answer in answers:
        if isinstance(answer, Denied):
            assert answer.retry_after_s > 0
    return sum(isinstance(answer, Granted) for answer in answers)


async def exact_again(quota: Quota, store: Store) -> None:
    assert await store.back(timeout_s=5)
    await quota.reserve(tenant(requests_per_min=99), RequestId("again"), 0)
    assert not quota.degraded


@pytest.mark.parametrize("fault", ["frozen", "refused", "slow"])
async def test_a_store_in_trouble_bounds_the_delay_and_keeps_every_limit(
    relay: Relay, store: Store, fault: str
) -> None:
    quota = Quota(store, QuotaConfig())
    assert await admitted(quota, ALL, 3) == 3
    match fault:
        case "frozen":
            relay.freeze()
        case "refused":
            await relay.cut()
        case "slow":
            relay.delay_s = 4 * TIMEOUT_S
    assert await admitted(quota, ALL, 20) == 5  # what was left: an outage is no gift
    assert quota.degraded
    began = time.monotonic()
    assert await admitted(quota, ALL, 20) == 0
    assert time.monotonic() - began < TIMEOUT_S  # the breaker is open: nothing is waited for
    relay.thaw()
    relay.delay_s = 0
    if fault == "refused":
        await relay.mend()
    await exact_again(quota, store)
    await quota.close()


async def test_a_store_that_is_slow_within_its_time_stays_exact(relay: Relay, store: Store) -> None:
    quota = Quota(store, QuotaConfig())
    relay.delay_s = TIMEOUT_S / 5
    assert await admitted(quota, ALL, 20) == 8
    assert not quota.degraded


async def test_a_flushed_store_begins_anew_and_stays_exact(store: Store, valkey_url: str) -> None:
    quota = Quota(store, QuotaConfig())
    assert await admitted(quota, ALL, 20) == 8
    with redis.Redis.from_url(valkey_url) as client:
        client.script_flush()
        for key in client.scan_iter(f"{store._prefix}*"):
            client.delete(key)
    assert await admitted(quota, ALL, 20) == 8
    assert not quota.degraded


async def test_a_store_without_scripting_is_named_and_its_limits_are_the_gateways_own(
    tmp_path: Path,
) -> None:
    with embedded(tmp_path) as url:
        with redis.Redis.from_url(url) as client:
            client.execute_command(
                *("ACL", "SETUSER", "plain", "on", ">pw", "~*", "&*", "+@all", "-@scripting")
            )
        store = Store(f"{url}?username=plain&password=pw", timeout_s=TIMEOUT_S)
        starting = asyncio.ensure_future(store.start())
        quota = Quota(store, QuotaConfig())
        async with asyncio.timeout(5):
            while "does not run" not in store.reason:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.02)
        assert "lua" in store.reason
        assert quota.degraded
        assert await admitted(quota, ALL, 20) == 8
        starting.cancel()
        await quota.close()
        await store.close()


async def test_a_gateway_starts_without_its_store_and_takes_it_up_when_it_comes(
    fleet: Any, valkey_url: str, tmp_path: Path
) -> None:
    """As a whole: ready says what lacks, and the first key works once the store is there."""
    from gateway.app import Gateway
    from gateway.config import GatewayConfig

    async with fleet(ScriptedReplica("replica-0")) as it:
        prefix = it.gateway.store._prefix
        relay = Relay(valkey_url, tmp_path / "late")
        late = Gateway(
            GatewayConfig.model_validate(
                {
                    "listen": {"port": 0},
                    "store": {"url": relay.url, "prefix": prefix, "spool": tmp_path / "late.spool"},
                    "fleet": {"replicas": [{"id": "replica-0", "url": it.replicas[0].url}]},
                }
            )
        )
        await late.start()
        ready = await it.http.get(f"{late.url}/readyz")
        assert ready.status_code == 503
        assert ready.json()["store"]["away"] is True
        answer = await it.http.get(f"{late.url}/v1/models")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_starting")
        assert answer.headers["retry-after"]
        await relay.mend()
        async with asyncio.timeout(10):
            while (await it.http.get(f"{late.url}/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (await it.http.get(f"{late.url}/v1/models")).status_code == 200
        await late.close()
        await relay.cut()
