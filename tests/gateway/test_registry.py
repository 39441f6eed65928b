"""The registry: the hot path reads memory, changes reach every gateway, and nothing is lost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from stores import Relay

from gateway.state.registry import BadField, Conflict, Limits, Missing, Registry, Tenant
from gateway.state.tenants import checked, decoded, encoded
from gateway.store.redis import Store, StoreAway
from shared.ids import TenantId


@pytest.fixture
def prefix() -> str:
    return f"{uuid.uuid4().hex}:"


@pytest.fixture
async def store(valkey_url: str, prefix: str) -> AsyncIterator[Store]:
    it = Store(valkey_url, prefix=prefix, timeout_s=2)
    await it.start()
    yield it
    await it.close()


@pytest.fixture
async def registry(store: Store) -> AsyncIterator[Registry]:
    it = Registry(store)
    await it.start()
    yield it
    await it.close()


async def until(holds: Callable[[], object], *, within_s: float = 5) -> float:
    """How long it took."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, "it did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


# keys


async def test_a_key_names_its_tenant_until_it_is_revoked(registry: Registry) -> None:
    await registry.create("acme", weight=2, limits=Limits(10, None))
    key, secret = await registry.key_create("acme")
    found = registry.tenant_for_key(secret)
    assert found is not None
    assert (found.id, found.weight, found.limits) == ("acme", 2, Limits(10, None))
    assert registry.keys("acme") == (key,)
    await registry.key_revoke("acme", key.id)
    assert registry.tenant_for_key(secret) is None
    assert registry.keys("acme") == ()
    with pytest.raises(Missing):
        await registry.key_revoke("acme", key.id)


@pytest.mark.parametrize("wrong", ["", "lp-", "x", "lp-" + "a" * 32, "\udc80\udcff", "ключ" * 999])
async def test_any_other_string_names_nobody(registry: Registry, wrong: str) -> None:
    await registry.create("acme")
    await registry.key_create("acme")
    assert registry.tenant_for_key(wrong) is None


async def test_a_secret_that_clients_hold_already_can_be_brought_along(
    registry: Registry,
) -> None:
    await registry.create("acme")
    key, secret = await registry.key_create("acme", "sk-1234")
    assert secret == "sk-1234"
    assert registry.tenant_for_key("sk-1234").id == "acme"
    assert key.prefix == "sk-", "a short one is not shown whole"
    with pytest.raises(Conflict, match="exists"):
        await registry.key_create("acme", "sk-1234")


@pytest.mark.parametrize(
    "secret", ["", "short", " padded-key", "line\nbreak", "ümlaut-key", "x" * 513]
)
async def test_a_secret_that_no_header_can_carry_is_refused(
    registry: Registry, secret: str
) -> None:
    await registry.create("acme")
    with pytest.raises(BadField, match="secret"):
        await registry.key_create("acme", secret)


async def test_secrets_are_long_distinct_and_nowhere_in_the_store(
    registry: Registry, valkey_url: str, prefix: str
) -> None:
    await registry.create("acme")
    secrets = {(await registry.key_create("acme"))[1] for _ in range(5)}
    assert len(secrets) == 5
    assert all(secret.startswith("lp-") and len(secret) == 35 for secret in secrets)
    with redis.Redis.from_url(valkey_url) as client:
        stored = b"".join(client.hgetall(f"{prefix}keys").values()).decode()
    assert not any(secret[8:] in stored for secret in secrets)


async def test_keys_of_a_tenant_that_does_not_exist_cannot_be_made(registry: Registry) -> None:
    with pytest.raises(Missing):
        await registry.key_create("nobody")


async def test_a_tenant_has_at_most_so_many_keys(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.state.registry.KEYS_MAX", 2)
    await registry.create("acme")
    await registry.create("acme2")
    for name in ("acme", "acme2", "acme", "acme2"):
        await registry.key_create(name)
    with pytest.raises(Conflict, match="revoke one"):
        await registry.key_create("acme")


# models


async def test_a_tenant_may_use_the_models_it_names_exactly(registry: Registry) -> None:
    some = await registry.create("some", models=["a", "base"])
    every = await registry.create("every")
    none = await registry.create("none", models=[])
    assert [registry.may_use(some, model) for model in ("a", "base", "A", "a*", "*")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert registry.may_use(every, "whatever")
    assert not registry.may_use(none, "a")
    await registry.delete("every")
    assert not registry.may_use(every, "whatever")


# changes


async def test_a_change_keeps_what_it_does_not_name(registry: Registry) -> None:
    made = await registry.create("acme", weight=3, models=["a"], limits=Limits(1, 2))
    changed = await registry.set("acme", limits={"tokens_per_min": None})
    assert changed.limits == Limits(1, None)
    assert (changed.weight, changed.models, changed.created) == (3, ("a",), made.created)
    assert changed.version > made.version
    assert registry.tenant("acme") == changed


async def test_a_change_of_what_was_changed_meanwhile_is_refused(registry: Registry) -> None:
    made = await registry.create("acme")
    await registry.set("acme", weight=2, expect_version=made.version)
    with pytest.raises(Conflict):
        await registry.set("acme", weight=3, expect_version=made.version)
    with pytest.raises(Conflict):
        await registry.delete("acme", expect_version=made.version)
    assert registry.tenants()[0].weight == 2


async def test_of_two_creators_one_wins(registry: Registry) -> None:
    made = await asyncio.gather(
        *[registry.create("acme", weight=n) for n in range(1, 9)], return_exceptions=True
    )
    assert sum(isinstance(one, Tenant) for one in made) == 1
    assert sum(isinstance(one, Conflict) for one in made) == 7


async def test_changes_of_different_fields_at_once_all_arrive(registry: Registry) -> None:
    await registry.create("acme")
    await asyncio.gather(
        registry.set("acme", weight=7),
        registry.set("acme", models=["m"]),
        registry.set("acme", limits={"requests_per_min": 5}),
    )
    (tenant,) = registry.tenants()
    assert (tenant.weight, tenant.models, tenant.limits) == (7, ("m",), Limits(5, None))


async def test_a_deleted_tenant_leaves_nothing_behind_for_its_successor(
    registry: Registry, valkey_url: str, prefix: str
) -> None:
    first = await registry.create("acme")
    await registry.create("acme2")
    _, secret = await registry.key_create("acme")
    _, kept = await registry.key_create("acme2")
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(f"{prefix}quota:acme", "tokens:level", "-5")
        await registry.delete("acme")
        assert not client.exists(f"{prefix}quota:acme")
    assert registry.tenant_for_key(secret) is None
    assert registry.tenant_for_key(kept) is not None
    again = await registry.create("acme")
    assert again.version > first.version
    assert registry.keys("acme") == ()
    for gone in ("nobody", "acme3"):
        with pytest.raises(Missing):
            await registry.delete(gone)
        with pytest.raises(Missing):
            await registry.set(gone, weight=1)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("id", {"id": ""}),
        ("id", {"id": "a\nb"}),
        ("id", {"id": "a/b"}),
        ("id", {"id": ".."}),
        ("id", {"id": "é" * 129}),
        ("id", {"id": "\ud800"}),
        ("weight", {"weight": 0}),
        ("weight", {"weight": float("nan")}),
        ("weight", {"weight": "2"}),
        ("weight", {"weight": True}),
        ("models", {"models": ("a", "")}),
        ("models", {"models": (7,)}),
        ("models", {"models": ("m\x00",)}),
        ("limits.requests_per_min", {"limits": Limits(-1, None)}),
        ("limits.tokens_per_min", {"limits": Limits(None, 1.5)}),  # type: ignore[arg-type]
        ("limits.tokens_per_min", {"limits": Limits(None, True)}),
    ],
)
async def test_a_bad_field_is_named(
    registry: Registry, param: str, fields: dict[str, object]
) -> None:
    with pytest.raises(BadField) as caught:
        await registry.create(str(fields.pop("id", "acme")), **fields)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert registry.tenants() == ()


NAMES = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=60)


@given(
    id=NAMES.map(lambda name: "id " + name.replace("/", "_")),
    weight=st.floats(0.001, 1e6),
    models=st.lists(NAMES, max_size=5),
    limits=st.builds(
        Limits, st.none() | st.integers(0, 10**12), st.none() | st.integers(0, 10**12)
    ),
)
def test_what_is_written_down_reads_the_same(
    id: str, weight: float, models: list[str], limits: Limits
) -> None:
    tenant = checked(Tenant(TenantId(id), weight, tuple(models), limits, created=1.5, version=7))
    assert decoded(id, f"7 {encoded(tenant).decode()}") == tenant


# several gateways, and outages


async def test_a_change_reaches_other_gateways_within_a_second(
    registry: Registry, valkey_url: str, prefix: str
) -> None:
    store = Store(valkey_url, prefix=prefix, timeout_s=2)
    await store.start()
    other = Registry(store, poll_s=60)
    await other.start()
    await asyncio.sleep(0.1)
    await registry.create("acme")
    key, secret = await registry.key_create("acme")
    assert await until(lambda: other.tenant_for_key(secret)) < 1
    await registry.set("acme", weight=9)
    assert await until(lambda: other.tenants()[0].weight == 9) < 1
    await registry.key_revoke("acme", key.id)
    assert await until(lambda: other.tenant_for_key(secret) is None) < 1
    await other.close()
    await store.close()


async def test_a_lost_message_is_made_up_for_by_polling(
    registry: Registry, valkey_url: str, prefix: str
) -> None:
    await registry.create("acme")
    quick = Registry(registry._store, poll_s=0.1)
    await quick.start()
    with redis.Redis.from_url(valkey_url) as client:
        client.hdel(f"{prefix}tenants", "acme")
        client.incr(f"{prefix}registry")  # changed, and nobody was told
    await until(lambda: quick.tenants() == (), within_s=2)
    await quick.close()


async def test_a_gateway_starts_without_the_store_and_loads_when_it_comes(
    registry: Registry, valkey_url: str, prefix: str, tmp_path: Path
) -> None:
    await registry.create("acme")
    _, secret = await registry.key_create("acme")
    relay = Relay(valkey_url, tmp_path / "late")
    store = Store(relay.url, prefix=prefix, timeout_s=2)
    late = Registry(store)
    await late.start()
    assert not late.loaded
    assert late.tenant_for_key(secret) is None
    with pytest.raises(StoreAway):
        await late.create("other")
    await relay.mend()
    await until(lambda: late.loaded)
    assert late.tenant_for_key(secret) is not None
    await late.close()
    await store.close()
    await relay.cut()


async def test_what_was_loaded_outlives_the_store_and_catches_up(
    registry: Registry, valkey_url: str, prefix: str, tmp_path: Path
) -> None:
    await registry.create("acme")
    _, secret = await registry.key_create("acme")
    async with Relay(valkey_url, tmp_path / "r") as relay:
        store = Store(relay.url, prefix=prefix, timeout_s=2)
        far = Registry(store, poll_s=0.2)
        await far.start()
        assert far.tenant_for_key(secret) is not None
        await relay.cut()
        await registry.set("acme", weight=5)
        assert far.tenants()[0].weight == 1
        assert far.tenant_for_key(secret) is not None
        await relay.mend()
        await until(lambda: far.tenants()[0].weight == 5)
        await far.close()
        await store.close()


async def test_it_closes_whatever_it_is_doing(store: Store) -> None:
    for turns in range(30):
        registry = Registry(store)
        await registry.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(registry.close(), 5)


async def test_an_unreadable_row_hides_only_itself(
    registry: Registry, valkey_url: str, prefix: str
) -> None:
    await registry.create("acme")
    with redis.Redis.from_url(valkey_url) as client:
        client.hset(f"{prefix}tenants", "broken", "no version and no json")
        client.hset(f"{prefix}keys", "acme\nk", '{"digest": "x"}')
        client.hset(f"{prefix}keys", "ghost\nk", '{"digest": "x", "prefix": "", "created": 1}')
    await registry.create("other")
    assert [tenant.id for tenant in registry.tenants()] == ["acme", "other"]
