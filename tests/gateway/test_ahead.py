"""Quota reserved ahead: never more than the store let go, and nothing of it near a limit."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from gateway.config import QuotaConfig
from gateway.state.ahead import FAR, LEAST, LIFE_S, SHARE
from gateway.state.quota import Denied, Granted, Quota
from gateway.state.tenants import Limits, Tenant
from gateway.store.redis import Store
from shared.clock import monotonic
from shared.ids import RequestId, TenantId


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    it = Store(valkey_url, prefix=f"{uuid.uuid4().hex}:", timeout_s=2.0)
    await it.start()
    yield it
    await it.close()


def tenant(requests: int | None, tokens: int | None = None, **more: int) -> Tenant:
    return Tenant(TenantId("t"), limits=Limits(requests, tokens, **more))


def request() -> RequestId:
    return RequestId(uuid.uuid4().hex)


async def ask(quota: Quota, who: Tenant, tokens: int = 10) -> bool:
    return isinstance(await quota.reserve(who, request(), tokens), Granted)


async def warm(quota: Quota, who: Tenant) -> None:
    """Busy enough to have a block."""
    for _ in range(2 * LEAST):
        assert await ask(quota, who)
    await asyncio.sleep(0.02)


async def level(quota: Quota, who: Tenant, name: str) -> int:
    return next(line.remaining for line in await quota.peek(who) if line.name == name)


async def test_a_busy_tenant_needs_no_call_of_the_store(store: Store) -> None:
    quota, who = Quota(store, QuotaConfig()), tenant(100_000, 10_000_000)
    assert quota.take(who, request(), 10) is None
    await warm(quota, who)
    taken = [quota.take(who, request(), 10) for _ in range(LEAST // 2)]
    assert all(taken)
    await quota.close()


async def test_gateways_together_grant_what_the_store_let_go_and_no_more(store: Store) -> None:
    limit = 3000
    quotas, who = [Quota(store, QuotaConfig()) for _ in range(3)], tenant(limit)
    began = monotonic()
    granted, refused = 0, set()
    while len(refused) < len(quotas):
        for quota in quotas:
            answers = await asyncio.gather(*[ask(quota, who) for _ in range(20)])
            granted += sum(answers)
            if not all(answers):
                refused.add(quota)
        await asyncio.sleep(0)
    took_s = monotonic() - began
    assert granted <= limit + limit / 60 * (took_s + 2 * LIFE_S)
    assert granted >= limit - len(quotas) * 1.5 * SHARE * limit
    for quota in quotas:
        await quota.close()


async def test_near_a_limit_every_request_asks_the_store(store: Store) -> None:
    quota, who = Quota(store, QuotaConfig()), tenant(100_000, 1_000_000)
    await warm(quota, who)
    assert await ask(quota, who, tokens=int((1 - FAR / 2) * 1_000_000))  # 15 s from FAR again
    await asyncio.sleep(LIFE_S + 0.05)
    for _ in range(3 * LEAST):
        assert await ask(quota, who, tokens=1)
        assert quota.take(who, request(), 1) is None
    await quota.close()


async def test_small_limits_have_no_blocks(store: Store) -> None:
    quota, who = Quota(store, QuotaConfig()), tenant(int(LEAST / SHARE) - 1)
    for _ in range(4 * LEAST):
        assert await ask(quota, who)
        await asyncio.sleep(0)
        assert quota.take(who, request(), 10) is None
    await quota.close()


async def test_who_has_leases_asks_each_time(store: Store) -> None:
    quota, who = Quota(store, QuotaConfig()), tenant(100_000, concurrency=1000)
    for _ in range(4 * LEAST):
        assert await ask(quota, who)
        await asyncio.sleep(0)
        assert quota.take(who, request(), 10) is None
    await quota.close()


async def test_what_is_not_spent_goes_back(store: Store) -> None:
    quota, other = Quota(store, QuotaConfig()), Quota(store, QuotaConfig())
    who = tenant(None, 6_000_000)  # refills by 100,000 a second
    for _ in range(2 * LEAST):
        assert await ask(quota, who, tokens=5000)
    await asyncio.sleep(0.02)
    held = await level(other, who, "tokens")
    await asyncio.sleep(2 * LIFE_S + 0.3)
    refilled = 100_000 * (2 * LIFE_S + 0.5)
    back = await level(other, who, "tokens")
    assert back > held
    assert back <= min(6_000_000, held + refilled + SHARE * 6_000_000)
    await quota.close()
    assert await level(other, who, "tokens") <= 6_000_000
    await other.close()


async def test_what_was_taken_and_not_used_can_be_put_back(store: Store) -> None:
    quota, who = Quota(store, QuotaConfig()), tenant(100_000, 10_000_000)
    await warm(quota, who)
    levels = []
    for _ in range(50):
        taken = quota.take(who, request(), 10)
        assert taken is not None
        levels.append(tuple(taken.answer.levels))
        quota.put_back(taken)
    assert len(set(levels)) == 1
    await quota.close()


async def test_what_a_reply_says_is_left_falls_by_what_was_taken(store: Store) -> None:
    quota, who = Quota(store, QuotaConfig()), tenant(100_000, 10_000_000)
    await warm(quota, who)
    first, second = (quota.take(who, request(), 10) for _ in range(2))
    assert first is not None
    assert second is not None
    assert [line.remaining for line in first.left] == [
        line.remaining + cost for line, cost in zip(second.left, (1, 10), strict=True)
    ]
    await quota.close()


async def test_a_refusal_is_as_true_as_ever(store: Store) -> None:
    quota, who = Quota(store, QuotaConfig()), tenant(1200)
    while True:
        answer = await quota.reserve(who, request(), 1)
        if isinstance(answer, Denied):
            break
    assert 0 < answer.retry_after_s <= 60 / 1200 + 1e-5
    await quota.close()
