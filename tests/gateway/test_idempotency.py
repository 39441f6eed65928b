"""A key guards against a double; it never stands in the way of a first."""

from __future__ import annotations

import pytest

from gateway.completion.idempotency import KEY_MAX, Idempotency
from gateway.errors import BadRequest, KeyReused
from gateway.store.redis import Store
from shared.ids import RequestId, TenantId

ACME, R1, R2 = TenantId("acme"), RequestId("req_1"), RequestId("req_2")


async def test_the_first_holds_a_key_until_it_lets_go(valkey_url: str, tmp_path) -> None:
    store = Store(valkey_url, prefix=f"{tmp_path.name}:", timeout_s=2)
    await store.start()
    keys = Idempotency(store)
    first = await keys.claim(ACME, "k", R1)
    with pytest.raises(KeyReused, match=R1) as caught:
        await keys.claim(ACME, "k", R2)
    assert caught.value.headers()["x-should-retry"] == "false"
    await keys.claim(TenantId("other"), "k", R2)
    await first.take(0)
    second = await keys.claim(ACME, "k", R2)
    await first.take(0)  # it has nothing to let go of any more
    with pytest.raises(KeyReused, match=R2):
        await keys.claim(ACME, "k", R1)
    await second.take(0)
    await store.close()


async def test_while_the_store_is_away_requests_run() -> None:
    keys = Idempotency(Store("redis://127.0.0.1:1/0"))
    await keys.claim(ACME, "k", R1)
    await keys.claim(ACME, "k", R2)


@pytest.mark.parametrize("key", ["", "x" * (KEY_MAX + 1), "a\tb"])
async def test_what_can_be_no_key_is_refused(key: str) -> None:
    with pytest.raises(BadRequest):
        await Idempotency(Store("redis://127.0.0.1:1/0")).claim(ACME, key, R1)
