"""Adapters' records, prices, key rotation and events: live everywhere, each change told once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedReplica, until

from gateway.state.adapter_records import AdapterRecord, AdapterVersion, added, switched
from gateway.state.audit import EVENTS, actor, shown
from gateway.state.prices import ANY, FREE, Price, checked_price, price_of
from gateway.state.registry import BadField, Conflict, Missing, Registry
from gateway.store.redis import Store
from shared.messages import Usage

OLD, NEW = "0" * 64, "f" * 64


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    it = Store(valkey_url, prefix=f"{uuid.uuid4().hex}:", timeout_s=2)
    await it.start()
    yield it
    await it.close()


@pytest.fixture
async def registry(store: Store) -> AsyncIterator[Registry]:
    it = Registry(store)
    await it.start()
    yield it
    await it.close()


# versions


async def test_a_name_means_its_current_version_and_a_rollback_is_one_call(fleet: Any) -> None:
    """Also in a gateway that runs: no request is served by the other version, whoever has room."""
    old = ScriptedReplica("replica-0", adapters=("pirate",), digests={"pirate": OLD})
    new = ScriptedReplica("replica-1", adapters=("pirate",), digests={"pirate": f"sha256:{NEW}"})
    async with fleet(old, new) as it:
        registry = it.gateway.registry

        async def served_by() -> set[str]:
            answers = await asyncio.gather(*[it.chat(model="pirate") for _ in range(12)])
            assert {answer.status_code for answer in answers} == {200}
            return {answer.headers["x-loraplex-replica"] for answer in answers}

        await registry.adapter_version("pirate", AdapterVersion(OLD[:12]))
        assert await served_by() == {"replica-0"}
        await registry.adapter_version("pirate", AdapterVersion(NEW, note="better"))
        assert await served_by() == {"replica-1"}
        await registry.adapter_switch("pirate")
        assert await served_by() == {"replica-0"}
        named = await it.chat(model=f"pirate@{NEW[:8]}")  # whoever asks for one by name gets it
        assert named.headers["x-loraplex-replica"] == "replica-1"
        await registry.adapter_version("pirate", AdapterVersion("a" * 64))
        assert (await it.chat(model="pirate")).status_code == 503  # nobody has it: not another one


async def test_versions_are_switched_by_any_unambiguous_beginning(registry: Registry) -> None:
    for digest in (OLD, NEW, "0" * 63 + "1"):
        await registry.adapter_version("pirate", AdapterVersion(digest))
    assert (await registry.adapter_switch("pirate", "ff")).current == NEW
    with pytest.raises(Missing):
        await registry.adapter_switch("pirate", "000")
    with pytest.raises(Missing):
        await registry.adapter_switch("absent", NEW)
    fresh = await registry.adapter_set("poet", owner="acme")
    assert fresh.current == ""
    with pytest.raises(Conflict, match="no earlier version"):
        await registry.adapter_switch("poet")


@given(st.lists(st.sampled_from(["a" * 12, "b" * 12, "c" * 12]), min_size=1, max_size=12))
def test_a_version_is_kept_once_and_the_last_one_before_is_remembered(digests: list[str]) -> None:
    record, history = AdapterRecord("pirate"), [""]
    for digest in digests:
        record = added(record, AdapterVersion(digest))
        if history[-1] != digest:
            history.append(digest)
        assert (record.current, record.previous) == (history[-1], history[-2])
    assert len(record.versions) == len(set(digests))
    assert switched(record, record.current) is record


# access


async def test_access_is_the_owners_and_those_named(registry: Registry) -> None:
    acme, beta = await registry.create("acme"), await registry.create("beta")
    gamma = await registry.create("gamma", models=("other",))
    assert registry.may_use(beta, "pirate")
    record = await registry.adapter_set("pirate", owner="acme", access=[])
    assert registry.may_use(acme, "pirate")
    assert not registry.may_use(beta, "pirate")
    await registry.adapter_set("pirate", access=["beta", "gamma"], expect_version=record.version)
    assert registry.may_use(beta, "pirate")
    assert not registry.may_use(gamma, "pirate")  # its own list says no
    with pytest.raises(Conflict):
        await registry.adapter_set("pirate", owner="beta", expect_version=record.version)
    await registry.adapter_delete("pirate")
    assert registry.may_use(beta, "pirate")


# keys


async def test_a_rotated_key_works_until_its_grace_is_over(store: Store) -> None:
    now = [1000.0]
    registry = Registry(store, clock=lambda: now[0])
    await registry.start()
    await registry.create("acme")
    key, old = await registry.key_create("acme")
    fresh, new = await registry.key_rotate("acme", key.id, grace_s=60)
    assert {one.id: one.expires for one in registry.keys("acme")} == {key.id: 1060, fresh.id: None}
    assert registry.tenant_for_key(old) is not None
    now[0] = 1060
    assert registry.tenant_for_key(old) is None
    assert registry.tenant_for_key(new) is not None
    last, newest = await registry.key_rotate("acme", fresh.id)
    assert registry.tenant_for_key(new) is None
    assert registry.tenant_for_key(newest) is not None
    with pytest.raises(Missing):
        await registry.key_rotate("acme", fresh.id)
    with pytest.raises(BadField):
        await registry.key_rotate("acme", last.id, grace_s=-1)
    await registry.close()


# prices

usages = st.builds(
    lambda prompt, cached, output: Usage(prompt + cached, output, cached),
    *[st.integers(0, 10**6)] * 3,
)


@given(usages, st.tuples(*[st.integers(0, 10**6)] * 3))
def test_a_price_is_exact_and_adds_up(usage: Usage, milli: tuple[int, int, int]) -> None:
    """Whole nano-units: as many tokens in two requests cost what they cost in one."""
    names = ("input", "cached_input", "output")
    price = checked_price({name: value / 1000 for name, value in zip(names, milli, strict=True)})
    assert (price.input, price.cached_input, price.output) == milli
    twice = Usage(2 * usage.prompt_tokens, 2 * usage.completion_tokens, 2 * usage.cached_tokens)
    assert price.of(twice) == 2 * price.of(usage)


def test_the_nearest_price_counts() -> None:
    table = {
        (ANY, ANY): Price(1),
        (ANY, "pirate"): Price(2),
        ("acme", ANY): Price(3),
        ("acme", "pirate"): Price(4),
    }
    asked = [("acme", "pirate"), ("acme", "x"), ("beta", "pirate"), ("beta", "x")]
    assert [price_of(table, *who).input for who in asked] == [4, 3, 2, 1]
    assert price_of({}, "acme", "x") is FREE


async def test_a_new_price_changes_no_old_bill(fleet: Any) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        registry = it.gateway.registry
        await registry.price_set("acme", ANY, Price(1000, 1000, 1000))
        await it.chat()
        await until(lambda: it.gateway.ledger.backlog_bytes == 0)
        await registry.price_set("acme", ANY, Price(9000, 9000, 9000))
        [row] = await it.usage()
        assert row["spend"] == pytest.approx(11_000 / 1e9)
        await it.chat()
        [row] = await it.usage()
        assert row["spend"] == pytest.approx(110_000 / 1e9)


# events


async def test_every_change_has_one_event_and_no_event_has_a_secret(
    registry: Registry, store: Store, valkey_url: str
) -> None:
    token = actor.set("a person")
    await registry.create("acme")
    await registry.set("acme", weight=2)
    key, secret = await registry.key_create("acme")
    key, second = await registry.key_rotate("acme", key.id)
    await registry.adapter_version("pirate", AdapterVersion(OLD))
    await registry.price_set(ANY, ANY, Price(1))
    for refused in (registry.create("acme"), registry.key_revoke("acme", "none")):
        with pytest.raises((Conflict, Missing)):
            await refused
    await registry.key_revoke("acme", key.id)
    await registry.price_delete(ANY, ANY)
    await registry.adapter_delete("pirate")
    await registry.delete("acme")
    actor.reset(token)
    found = [shown(*entry) for entry in await registry.events(EVENTS, after="", most=99)]
    assert [one["action"] for one in reversed(found)] == [
        *("tenant.created", "tenant.changed", "key.created", "key.rotated"),
        *("adapter.version_added", "price.changed", "key.revoked", "price.deleted"),
        *("adapter.deleted", "tenant.deleted"),
    ]
    assert {one["actor"] for one in found} == {"a person"}
    later = await registry.events(EVENTS, after=found[-1]["id"], most=2)
    assert [shown(*entry)["action"] for entry in later] == ["tenant.changed", "key.created"]
    with redis.Redis.from_url(valkey_url) as client:
        told = str(client.xrange(f"{store._prefix}{EVENTS}"))
    assert secret not in told
    assert second not in told
