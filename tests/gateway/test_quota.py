"""Quotas: exact across gateways, all or nothing, true about waiting, and bounded when alone."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from stores import Relay

from gateway.config import QuotaConfig
from gateway.core.bucket import Denied as BucketDenied
from gateway.core.bucket import TokenBucket
from gateway.state.limits import _duration
from gateway.state.quota import Denied, Granted, LimitLine, Quota, Reservation
from gateway.state.registry import Limits, Tenant
from gateway.store import redis as store_module
from gateway.store.redis import Store
from shared.clock import ManualClock, monotonic
from shared.ids import RequestId, TenantId

PATIENT_S = 2.0
LUA = Path(store_module.__file__).parent


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    it = Store(valkey_url, prefix=f"{uuid.uuid4().hex}:", timeout_s=PATIENT_S)
    await it.start()
    yield it
    await it.close()


@pytest.fixture
async def relay(valkey_url: str, tmp_path: Path) -> AsyncIterator[Relay]:
    async with Relay(valkey_url, tmp_path / "r") as it:
        yield it


@pytest.fixture
async def frozen_store(relay: Relay) -> AsyncIterator[Store]:
    """A store behind `relay`, with a short timeout."""
    it = Store(relay.url, prefix=f"{uuid.uuid4().hex}:", timeout_s=0.1)
    await it.start()
    yield it
    await it.close()


def tenant(requests: int | None = None, tokens: int | None = None, name: str = "t") -> Tenant:
    return Tenant(TenantId(name), limits=Limits(requests, tokens))


def quota_on(store: Store, *, share: float = 1.0, clock: Any = monotonic) -> Quota:
    return Quota(store, QuotaConfig(local_share=share), clock)


async def granted(quota: Quota, who: Tenant, tokens: int = 0) -> Reservation:
    answer = await quota.reserve(who, RequestId(uuid.uuid4().hex), tokens)
    assert isinstance(answer, Granted)
    return answer.reservation


async def denied(quota: Quota, who: Tenant, tokens: int = 0) -> Denied:
    answer = await quota.reserve(who, RequestId(uuid.uuid4().hex), tokens)
    assert isinstance(answer, Denied)
    return answer


async def tokens_left(quota: Quota, who: Tenant) -> int:
    return left(await quota.peek(who), "tokens")


def left(lines: list[LimitLine], name: str) -> int:
    [line] = [line for line in lines if line.name == name]
    return line.remaining


def asked(now_us: int | str, costs: dict[str, int], bursts: dict[str, int]) -> list[Any]:
    """Words of the script: limits a minute, and one request."""
    words: list[Any] = [now_us, len(costs)]
    for name in costs:
        words += ("rate", 1, name, bursts[name], 0)
    return [*words, "request", *costs.values()]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# the scripts and the pure bucket


def test_the_scripts_and_the_pure_bucket_give_the_same_answers(valkey_url: str) -> None:
    client = redis.Redis.from_url(valkey_url)
    scripts = {
        n: client.register_script((LUA / f"{n}.lua").read_text()) for n in ("reserve", "settle")
    }

    class Both(RuleBasedStateMachine):
        """Two limits in one script against two buckets, taken from together or not at all."""

        @initialize(bursts=st.tuples(st.integers(1, 50), st.integers(1, 100_000)))
        def begin(self, bursts: tuple[int, int]) -> None:
            self.key = uuid.uuid4().hex
            self.now_us = 1_700_000_000_000_000
            self.bursts = dict(zip(("requests", "tokens"), bursts, strict=True))
            self.buckets = {
                name: TokenBucket(rate_per_s=burst / 60, burst=burst, now=self.now)
                for name, burst in self.bursts.items()
            }

        @property
        def now(self) -> float:
            return self.now_us / 1e6

        @rule(passed_us=st.integers(0, 90_000_000))
        def wait(self, passed_us: int) -> None:
            self.now_us += passed_us

        @rule(part=st.floats(0, 1))
        def take(self, part: float) -> None:
            costs = {"requests": 1, "tokens": int(part * self.bursts["tokens"])}
            levels = {name: bucket.level(self.now) for name, bucket in self.buckets.items()}
            if any(abs(levels[name] - cost) < 1e-3 for name, cost in costs.items()):
                return  # a hair's breadth: the two may round to different sides
            words = asked(self.now_us, costs, self.bursts)
            refuses, wait_s, *found = scripts["reserve"]([self.key], words)
            client.persist(self.key)  # time in this test is not the server's
            waits = {
                name: answer.retry_after_s
                for name, cost in costs.items()
                if levels[name] < cost
                and isinstance(answer := self.buckets[name].take(cost, self.now), BucketDenied)
            }
            if waits:
                longest = max(waits, key=lambda name: waits[name])
                assert list(costs)[int(refuses) - 1] == longest
                assert float(wait_s) == pytest.approx(waits[longest], abs=1e-4)
            else:
                assert int(refuses) == 0
                for name, cost in costs.items():
                    self.buckets[name].take(cost, self.now)
            self.agree([float(level) for level in found])

        @rule(delta=st.integers(-100_000, 100_000))
        def settle(self, delta: int) -> None:
            words = [self.now_us, "tokens", self.bursts["tokens"], delta]
            level = float(scripts["settle"]([self.key], words))
            client.persist(self.key)
            self.buckets["tokens"].settle(delta, self.now)
            assert level == pytest.approx(self.buckets["tokens"].level(self.now), abs=1e-3)

        @rule()
        def come_back_when_told(self) -> None:
            words = asked(self.now_us, {"requests": self.bursts["requests"]}, self.bursts)
            refuses, wait_s, _ = scripts["reserve"]([self.key], words)
            if int(refuses):
                self.now_us += round(float(wait_s) * 1e6)
                words[0] = self.now_us
                assert int(scripts["reserve"]([self.key], words)[0]) == 0
            client.persist(self.key)
            self.buckets["requests"].take(self.bursts["requests"], self.now)
            self.buckets["requests"].settle(self.buckets["requests"].level(self.now), self.now)

        def agree(self, levels: list[float]) -> None:
            for level, bucket in zip(levels, self.buckets.values(), strict=True):
                assert level == pytest.approx(bucket.level(self.now), abs=1e-3)
                assert level <= bucket.burst

        def teardown(self) -> None:
            if hasattr(self, "key"):
                client.delete(self.key)

    run_state_machine_as_test(Both)
    client.close()


def test_a_clock_that_steps_back_adds_nothing_and_stops_nothing(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        reserve = client.register_script((LUA / "reserve.lua").read_text())
        key, hour_us = uuid.uuid4().hex, 3_600_000_000
        now_us = 10 * hour_us
        assert reserve([key], asked(now_us, {"x": 60}, {"x": 60}))[0] == b"0"
        client.persist(key)
        refuses, wait_s, level = reserve([key], asked(now_us - hour_us, {"x": 1}, {"x": 60}))
        assert (int(refuses), float(level)) == (1, 0.0)
        assert float(wait_s) == pytest.approx(1, abs=1e-3)
        later_us = now_us - hour_us + round(float(wait_s) * 1e6)
        assert reserve([key], asked(later_us, {"x": 1}, {"x": 60}))[0] == b"0"


# one reservation


async def test_gateways_together_admit_exactly_the_limit(store: Store, valkey_url: str) -> None:
    other = Store(valkey_url, prefix=store._prefix, timeout_s=PATIENT_S)
    await other.start()
    who, gateways = tenant(requests=10), (quota_on(store), quota_on(other))
    answers = await asyncio.gather(
        *[gateways[n % 2].reserve(who, RequestId(str(n)), 0) for n in range(60)]
    )
    assert sum(isinstance(answer, Granted) for answer in answers) == 10
    await other.close()


async def test_a_denied_request_takes_nothing(store: Store) -> None:
    quota, who = quota_on(store), tenant(requests=2, tokens=100)
    await granted(quota, who, 80)
    for _ in range(5):
        assert (await denied(quota, who, 80)).limit == "tokens"
    await granted(quota, who, 20)  # the refused ones left both the request and the tokens
    assert (await denied(quota, who, 0)).limit == "requests"


async def test_whoever_waits_as_told_is_admitted(store: Store) -> None:
    quota, who = quota_on(store), tenant(requests=600)
    answer: Granted | Denied
    while isinstance(answer := await quota.reserve(who, RequestId("r"), 0), Granted):
        pass
    assert 0 < answer.retry_after_s <= 0.1
    await asyncio.sleep(answer.retry_after_s)
    await granted(quota, who)


async def test_an_estimate_above_the_limit_is_clipped_to_it(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens=50)
    reservation = await granted(quota, who, 5000)
    assert reservation.tokens == 50
    refused = await denied(quota, who, 1)
    assert refused.retry_after_s == pytest.approx(60 / 50, abs=0.3)
    assert not refused.never


async def test_a_limit_of_zero_never_admits_and_says_so(store: Store) -> None:
    refused = await denied(quota_on(store), tenant(requests=0, tokens=100), 1)
    assert refused.never
    assert refused.limit == "requests"
    assert left(refused.left, "requests") == 0


async def test_a_tenant_without_limits_asks_no_store(valkey_url: str) -> None:
    never_started = Store(valkey_url)
    quota = quota_on(never_started)
    reservation = await granted(quota, tenant(), 10**9)
    quota.settle(reservation, 5)
    assert await quota.peek(tenant()) == []
    await quota.close()
    await never_started.close()


@pytest.mark.parametrize("moment", ["asking", "told"])
async def test_who_leaves_while_asking_gets_the_tokens_back(store: Store, moment: str) -> None:
    quota, who = quota_on(store), tenant(tokens=1000)
    asking = asyncio.ensure_future(granted(quota, who, 400))
    if moment == "told":  # the answer is there, and its task has not run yet
        tell = quota._tell

        def told_and_left(*answer: Any) -> None:
            tell(*answer)
            asking.cancel()

        quota._tell = told_and_left  # type: ignore[method-assign]
    else:
        await asyncio.sleep(0)
        asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    if moment == "told":
        quota._tell = tell  # type: ignore[method-assign]
    await tokens_left(quota, who)  # a round trip later
    await quota.close()  # what is owed is paid
    assert await tokens_left(quota, who) == 1000


async def test_the_state_says_what_is_left_and_when_it_is_full(store: Store) -> None:
    quota, who = quota_on(store), tenant(requests=10, tokens=1000)
    answer = await quota.reserve(who, RequestId("r"), 400)
    requests, tokens = answer.left
    assert (requests.name, requests.limit, requests.remaining) == ("requests", 10, 9)
    assert (tokens.name, tokens.limit, tokens.remaining) == ("tokens", 1000, 600)
    assert tokens.reset_s == pytest.approx(24)
    named = dict(line.split(": ", 1) for line in answer.headers.splitlines())
    assert named["x-ratelimit-limit-requests"] == "10"
    assert named["x-ratelimit-remaining-tokens"] == "600"
    assert named["x-ratelimit-reset-tokens"] == "24s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0ms"), (0.0121, "13ms"), (1, "1s"), (7.5, "7.5s"), (360, "6m0s")],
        *[(61.25, "1m1.25s"), (86_399.5, "24h0m0s")],
    ],
)
def test_resets_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


async def test_a_changed_limit_holds_from_the_next_request(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens=1000)
    await granted(quota, who, 100)
    less = replace(who, limits=Limits(None, 300))
    assert await tokens_left(quota, less) == 300
    await granted(quota, less, 300)
    assert (await denied(quota, less, 300)).limit == "tokens"


# settling


async def settled(quota: Quota) -> None:
    await asyncio.sleep(0.1)  # one flush
    await quota._debts.pay()


async def test_settling_gives_back_what_was_not_used(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens=1000)
    quota.settle(await granted(quota, who, 900), 150)
    await settled(quota)
    assert 850 <= await tokens_left(quota, who) <= 870


async def test_a_debt_is_waited_for(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens=600)
    quota.settle(await granted(quota, who, 600), 1200)
    await settled(quota)
    refused = await denied(quota, who, 10)
    assert refused.retry_after_s == pytest.approx(61, abs=1.5)
    assert left(refused.left, "tokens") == 0


async def test_a_refund_never_lifts_the_level_above_the_limit(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens=6_000_000)
    for _ in range(5):
        quota.settle(await granted(quota, who, 100_000), 0)
        await asyncio.sleep(0.2)
    await settled(quota)
    assert await tokens_left(quota, who) == 6_000_000


async def test_a_reservation_is_settled_once(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens=10_000)
    reservation = await granted(quota, who, 5000)
    for _ in range(3):
        quota.settle(reservation, 4000)
    await settled(quota)
    assert 6000 <= await tokens_left(quota, who) <= 6100


# degraded


async def test_a_frozen_store_costs_one_timeout_then_nothing_and_recovers(
    relay: Relay, frozen_store: Store
) -> None:
    quota, who = quota_on(frozen_store), tenant(requests=100)
    await granted(quota, who)
    assert not quota.degraded
    relay.freeze()
    with within(0.5):
        await granted(quota, who)
    assert quota.degraded
    with within(0.1):
        for _ in range(50):
            await granted(quota, who)
    relay.thaw()
    assert await frozen_store.back(timeout_s=5)
    await granted(quota, who)
    assert not quota.degraded


async def test_an_outage_is_no_gift(relay: Relay, frozen_store: Store) -> None:
    """The local buckets begin at the levels last seen, and what they grant is charged later."""
    quota, who = quota_on(frozen_store), tenant(requests=10)
    for _ in range(7):
        await granted(quota, who)
    relay.freeze()
    for _ in range(3):
        await granted(quota, who)
    assert (await denied(quota, who)).limit == "requests"
    relay.thaw()
    assert await frozen_store.back(timeout_s=5)
    await asyncio.sleep(0.7)
    await quota._debts.pay()
    assert (await denied(quota, who)).limit == "requests"
    await quota.close()


async def test_alone_a_gateway_grants_its_share_and_tells_the_truth_about_waiting(
    valkey_url: str, tmp_path: Path
) -> None:
    away, clock = Store(f"unix://{tmp_path}/none"), ManualClock(100)
    quota, who = quota_on(away, share=0.5, clock=clock), tenant(requests=10, tokens=1000)
    assert quota.degraded
    assert (await granted(quota, who, 800)).tokens == 500  # clipped to the share
    refused = await denied(quota, who, 100)
    assert refused.limit == "tokens"
    clock.advance(refused.retry_after_s)
    reservation = await granted(quota, who, 100)
    quota.settle(reservation, 20)
    assert await tokens_left(quota, who) == 80
    for _ in range(4):
        await granted(quota, who)
    assert (await denied(quota, who)).limit == "requests"
    await quota.close()
    await away.close()


async def test_a_share_below_one_request_still_lets_one_through(tmp_path: Path) -> None:
    away = Store(f"unix://{tmp_path}/none")
    quota = quota_on(away, share=0.1)
    await granted(quota, tenant(requests=2))
    await denied(quota, tenant(requests=2))
    await quota.close()
    await away.close()


async def test_a_store_that_refuses_scripts_is_named_and_replaced(
    store: Store, valkey_url: str
) -> None:
    quota, who = quota_on(store), tenant(requests=5)
    with redis.Redis.from_url(valkey_url) as client:
        client.set(f"{store._prefix}quota:t", "not a hash")
        await granted(quota, who)
        assert quota.degraded
        client.delete(f"{store._prefix}quota:t")
    await granted(quota, who)
    assert not quota.degraded


async def test_what_is_owed_refills_while_the_store_is_away(
    relay: Relay, frozen_store: Store
) -> None:
    clock = ManualClock(100)
    quota, who = quota_on(frozen_store, clock=clock), tenant(tokens=600)
    await quota.peek(who)
    await relay.cut()
    await asyncio.sleep(0.1)
    assert frozen_store.away
    await granted(quota, who, 600)
    clock.advance(30)
    await relay.mend()
    assert await frozen_store.back(timeout_s=5)
    await asyncio.sleep(0.7)
    await quota._debts.pay()
    assert 290 <= await tokens_left(quota, who) <= 320
    await quota.close()


# many at once


async def test_requests_of_one_turn_are_decided_in_one_call_as_if_one_by_one(
    relay: Relay, frozen_store: Store
) -> None:
    quota, who = quota_on(frozen_store), tenant(100, 1000)
    before = relay.reads
    answers = await asyncio.gather(
        *[quota.reserve(who, RequestId(f"{n}"), cost) for n, cost in enumerate([400, 700, 500, 90])]
    )
    assert [isinstance(answer, Granted) for answer in answers] == [True, False, True, True]
    assert [left(answer.left, "tokens") for answer in answers] == [600, 600, 100, 10]
    assert [left(answer.left, "requests") for answer in answers] == [99, 99, 98, 97]
    assert relay.reads == before + 1


async def test_more_than_a_call_holds_goes_in_several(store: Store) -> None:
    quota, who = quota_on(store), tenant(150)
    answers = await asyncio.gather(*[quota.reserve(who, RequestId(f"{n}"), 1) for n in range(200)])
    assert [isinstance(answer, Granted) for answer in answers] == [True] * 150 + [False] * 50


async def test_tenants_of_one_turn_do_not_share(store: Store) -> None:
    quota = quota_on(store)
    one, other = tenant(1), tenant(1, name="other")
    answers = await asyncio.gather(
        *[quota.reserve(who, RequestId("r"), 1) for who in (one, other, one, other)]
    )
    assert [isinstance(answer, Granted) for answer in answers] == [True, True, False, False]


async def test_who_leaves_before_the_answer_gets_its_tokens_back(store: Store) -> None:
    quota, who = quota_on(store), tenant(tokens=1000)
    gone = asyncio.ensure_future(quota.reserve(who, RequestId("r"), 400))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    async with asyncio.timeout(2):
        while await tokens_left(quota, who) < 1000:  # noqa: ASYNC110  # the store tells nobody
            await asyncio.sleep(0.02)
