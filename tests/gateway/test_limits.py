"""Every kind of limit, by itself and together: exact, all or nothing, and given back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import QuotaConfig
from gateway.state.limits import NANO, Line, Need, Plan, header_lines
from gateway.state.limits import Answer as LimitAnswer
from gateway.state.quota import Denied, Granted, Quota
from gateway.state.tenants import Limits, Tenant
from gateway.store.redis import Store
from shared.clock import wall
from shared.ids import RequestId, TenantId


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    it = Store(valkey_url, prefix=f"{uuid.uuid4().hex}:", timeout_s=2)
    await it.start()
    yield it
    await it.close()


def tenant(*, shadow: bool = False, adapters: dict[str, Limits] | None = None, **limits: Any):  # type: ignore[no-untyped-def]
    return Tenant(
        TenantId("t"), limits=Limits(**limits), adapter_limits=adapters or {}, shadow=shadow
    )


def quota_on(store: Store, *, wall: Any = wall, **config: Any) -> Quota:
    return Quota(store, QuotaConfig(**config), wall=wall)


async def ask(
    quota: Quota, who: Tenant, prompt: int = 0, output: int = 0, **more: Any
) -> Granted | Denied:
    name = RequestId(uuid.uuid4().hex)
    return await quota.reserve(who, name, prompt + output, output_tokens=output, **more)


async def granted(quota: Quota, who: Tenant, *tokens: int, **more: Any) -> Granted:
    answer = await ask(quota, who, *tokens, **more)
    assert isinstance(answer, Granted), answer
    return answer


async def denied(quota: Quota, who: Tenant, *tokens: int, **more: Any) -> Denied:
    answer = await ask(quota, who, *tokens, **more)
    assert isinstance(answer, Denied)
    return answer


async def settled(quota: Quota) -> None:
    await quota._debts.pay()


def remaining(left: Any) -> dict[str, int]:
    return {line.name + (f"/{line.model}" if line.model else ""): line.remaining for line in left}


# input and output by themselves


async def test_input_and_output_have_limits_of_their_own(store: Store) -> None:
    quota = quota_on(store)
    who = tenant(input_tokens_per_min=100, output_tokens_per_min=1000)
    first = await granted(quota, who, 80, 100)
    assert (await denied(quota, who, 80, 0)).limit == "input_tokens"
    assert (await denied(quota, who, 0, 950)).limit == "output_tokens"
    quota.settle(first.reservation, 90, output_tokens=80)
    await settled(quota)
    left = remaining(await quota.peek(who))
    assert left["input_tokens"] in range(90, 100)
    assert left["output_tokens"] in range(920, 960)


async def test_a_refusal_by_one_limit_takes_nothing_of_any_other(store: Store) -> None:
    quota = quota_on(store)
    mine = {"pirate": Limits(output_tokens_per_min=50)}
    who = tenant(
        requests_per_min=9,
        tokens_per_min=900,
        concurrency=9,
        tokens_per_day=900,
        spend_per_month=9,
        adapters=mine,
    )
    await granted(quota, who, 10, 50, model="pirate", spend=NANO)
    before = remaining(await quota.peek(who, "pirate"))
    refused = await denied(quota, who, 10, 50, model="pirate", spend=NANO)
    assert (refused.limit, refused.line.model) == ("output_tokens", "pirate")
    after = remaining(await quota.peek(who, "pirate"))
    for name in before.keys() - {"output_tokens/pirate"}:
        assert after[name] in (before[name], before[name] + 1), name  # some refills meanwhile
    assert after["concurrency"] == 8
    assert after["tokens_per_day"] == 840


# an adapter's own


async def test_an_adapter_has_limits_beside_its_tenants(store: Store) -> None:
    quota = quota_on(store)
    who = tenant(requests_per_min=3, adapters={"pirate": Limits(requests_per_min=1)})
    await granted(quota, who, model="pirate")
    refused = await denied(quota, who, model="pirate")
    assert refused.line.title == "requests per minute for pirate"
    await granted(quota, who, model="poet")
    await granted(quota, who, model="tiny")
    assert (await denied(quota, who, model="poet")).line.model == ""


async def test_tenant_and_adapter_share_one_exact_decision_over_gateways(
    store: Store, valkey_url: str
) -> None:
    other = Store(valkey_url, prefix=store._prefix, timeout_s=2)
    await other.start()
    quotas = (quota_on(store), quota_on(other))
    who = tenant(requests_per_min=20, adapters={"pirate": Limits(requests_per_min=5)})
    models = ["pirate", "poet", "tiny"]
    answers = await asyncio.gather(
        *[ask(quotas[n % 2], who, model=models[n % 3]) for n in range(60)]
    )
    passed = [n for n, answer in enumerate(answers) if isinstance(answer, Granted)]
    assert len(passed) == 20
    assert sum(models[n % 3] == "pirate" for n in passed) <= 5
    await other.close()


# concurrency


async def test_a_lease_is_free_for_the_next_as_soon_as_its_request_ends(store: Store) -> None:
    quota, who = quota_on(store), tenant(concurrency=2)
    first, _ = await granted(quota, who), await granted(quota, who)
    refused = await denied(quota, who)
    assert (refused.limit, refused.retry_after_s) == ("concurrency", 1.0)
    quota.settle(first.reservation, 0)
    await granted(quota, who)  # at once: nothing is gathered, nothing is waited for
    await denied(quota, who)


async def test_leases_of_a_gateway_that_died_end_by_themselves(
    store: Store, valkey_url: str
) -> None:
    dying = quota_on(store, lease_s=1)
    who = tenant(concurrency=1)
    await granted(dying, who)
    dying._leases.close()  # as a killed one prolongs nothing
    other = Store(valkey_url, prefix=store._prefix, timeout_s=2)
    await other.start()
    living = quota_on(other, lease_s=1)
    await denied(living, who)
    await asyncio.sleep(1.05)
    await granted(living, who)
    await other.close()


async def test_a_request_that_runs_longer_than_a_lease_keeps_it(store: Store) -> None:
    quota, who = quota_on(store, lease_s=1), tenant(concurrency=1)
    running = await granted(quota, who)
    await asyncio.sleep(1.6)
    await denied(quota, who)
    quota.settle(running.reservation, 5)
    await granted(quota, who)
    await quota.close()


async def test_who_leaves_while_asking_holds_no_lease(store: Store) -> None:
    quota, who = quota_on(store), tenant(concurrency=1)
    for _ in range(20):
        asking = asyncio.ensure_future(ask(quota, who))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await quota.peek(who)  # a round trip later
    await granted(quota, who)


async def test_a_lease_that_nobody_holds_is_in_no_table(store: Store, valkey_url: str) -> None:
    quota, who = quota_on(store), tenant(concurrency=5, adapters={"a": Limits(concurrency=3)})
    held = [await granted(quota, who, model="a") for _ in range(3)]
    for one in held:
        quota.settle(one.reservation, 1)
    await quota.peek(who)
    assert quota._leases._held == {}
    with redis.Redis.from_url(valkey_url) as client:
        assert not list(client.scan_iter(f"{store._prefix}leases:*"))


# budgets


async def test_a_budget_admits_while_anything_is_left_and_is_settled_later(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens_per_day=100)
    first = await granted(quota, who, 10, 256)  # no max_tokens: an estimate above the budget
    refused = await denied(quota, who, 1, 1)
    assert refused.spent
    quota.settle(first.reservation, 40, output_tokens=30)
    await settled(quota)
    assert remaining(await quota.peek(who)) == {"tokens_per_day": 60}
    await granted(quota, who, 30, 30)
    assert (await denied(quota, who, 1, 0)).limit == "tokens_per_day"


async def test_calls_at_once_cannot_spend_the_last_of_a_budget_twice(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens_per_month=100)
    answers = await asyncio.gather(*[ask(quota, who, 30, 30) for _ in range(50)])
    assert sum(isinstance(answer, Granted) for answer in answers) == 2  # 0 < 100, 60 < 100


async def test_money_is_a_budget_too(store: Store) -> None:
    quota, who = quota_on(store), tenant(spend_per_day=0.5, spend_per_month=10)
    first = await granted(quota, who, 1, 1, spend=NANO // 4)
    quota.settle(first.reservation, 2, spend=NANO // 2)
    await settled(quota)
    refused = await denied(quota, who, 1, 1, spend=1)
    assert refused.limit == "spend_per_day"
    assert remaining(refused.left)["spend_per_month"] == 9.5 * NANO


async def test_a_spent_budget_says_when_it_begins_anew(store: Store) -> None:
    at = datetime(2026, 12, 31, 23, 59, 30, tzinfo=UTC).timestamp()
    ends = Plan(tenant(tokens_per_day=1, tokens_per_month=1), "", at, 30).lines
    assert {line.until - at for line in ends} == {30.0}
    quota, who = quota_on(store), tenant(tokens_per_day=10)
    await granted(quota, who, 10)
    refused = await denied(quota, who, 1)
    tomorrow = -wall() % 86_400
    assert refused.retry_after_s == pytest.approx(tomorrow, abs=3)


async def test_a_new_day_begins_with_the_whole_budget_and_the_month_goes_on(store: Store) -> None:
    now = [datetime(2026, 11, 29, 23, 59, tzinfo=UTC).timestamp()]
    quota = quota_on(store, wall=lambda: now[0])
    who = tenant(tokens_per_day=100, tokens_per_month=1000)
    late = await granted(quota, who, 100)
    await denied(quota, who, 1)
    now[0] += 120
    await granted(quota, who, 100)
    quota.settle(late.reservation, 40)  # goes to the day that it was taken from
    await settled(quota)
    assert remaining(await quota.peek(who)) == {"tokens_per_day": 0, "tokens_per_month": 860}


# shadow


@pytest.mark.parametrize("by_config", [True, False])
async def test_in_shadow_all_is_told_and_nothing_refused(store: Store, by_config: bool) -> None:
    told: list[tuple[str, bool]] = []
    config = QuotaConfig(shadow=by_config)
    quota = Quota(store, config, refused=lambda limit, shadow: told.append((limit, shadow)))
    who = tenant(requests_per_min=2, concurrency=50, shadow=not by_config)
    answers = [await granted(quota, who) for _ in range(5)]
    assert told == [("requests", True)] * 3
    assert "x-ratelimit-remaining-requests: 0" in answers[-1].headers
    for answer in answers:
        quota.settle(answer.reservation, 5)
    enforced = tenant(requests_per_min=2, concurrency=50)
    if not by_config:
        await denied(quota, enforced)  # and it is enforced from the next request on
        assert told[-1] == ("requests", False)


# what is written of them


@given(st.dictionaries(st.sampled_from(Limits.__slots__), st.integers(1, 10**6)), st.integers(0, 9))
def test_a_plan_names_each_limit_once_and_rates_first(limits: dict[str, int], day: int) -> None:
    who = tenant(**limits, adapters={"a": Limits(**limits)})
    plan = Plan(who, "a", day * 86_400.0, 30)
    assert len(plan.lines) == 2 * len(limits)
    assert len({(line.key, line.field) for line in plan.lines}) == len(plan.lines)
    kinds = [line.kind == "rate" for line in plan.lines]
    assert kinds == sorted(kinds, reverse=True)
    assert len(plan.words) == 2 + 5 * len(plan.lines)
    need = Need(3, 4, 5)
    pairs = zip(plan.lines, plan.costs(need), strict=True)
    assert all(0 <= cost <= line.cost(need) for line, cost in pairs)


def test_of_several_limits_the_tightest_is_shown() -> None:
    minute = Line("rate", "tokens", "", 1000, "k", "f")
    adapter = Line("rate", "tokens", "a", 500, "k", "g")
    day = Line("budget", "tokens_per_day", "", 10_000, "k", "d", 3600.0)
    text = header_lines(LimitAnswer((minute, adapter, day), (900.0, 400.0, 50.0)), 0.0)
    assert "x-ratelimit-limit-tokens: 10000\r\nx-ratelimit-remaining-tokens: 50\r\n" in text
    assert "x-ratelimit-reset-tokens: 60m0s" in text
    assert text.count("x-ratelimit-remaining-tokens") == 1
