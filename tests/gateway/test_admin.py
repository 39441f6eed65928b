"""The admin API over real sockets: what it shows is true, what it refuses it explains."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.admin.api import AdminServices, add_admin_routes
from gateway.config import GatewayConfig, QuotaConfig
from gateway.core.dispatcher import Dispatcher
from gateway.fleet.deciding import dispatcher_of
from gateway.state.ledger import Ledger, Record
from gateway.state.quota import Quota
from gateway.state.registry import Registry
from gateway.state.tenants import Limits
from gateway.store.redis import Store
from shared.clock import monotonic, wall
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

KEY = "operators-only"
NO_LIMITS = dict.fromkeys(Limits.__slots__)


@dataclass
class Running:
    http: httpx.AsyncClient
    registry: Registry
    ledger: Ledger
    quota: Quota
    dispatcher: Dispatcher
    woken: list[bool]

    async def call(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        reply = await self.http.request(method, f"/admin/v1/{path}", **options)
        assert reply.status_code == status, reply.text
        assert reply.headers.get("x-request-id") or status == 204
        return reply.json() if reply.content else None

    async def refused(self, method: str, path: str, status: int, **options: Any) -> Any:
        """The `error` object, of OpenAI's shape."""
        body = await self.call(method, path, status, **options)
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]


def report(replica: str, *adapters: AdapterState) -> ReplicaReport:
    return ReplicaReport(
        replica=ReplicaId(replica),
        boot="b",
        seq=1,
        base="tiny",
        slots=4,
        capacity=8,
        running=1,
        waiting=0,
        pages_total=100,
        pages_free=60,
        max_model_len=512,
        heartbeat_s=1000,
        adapters=adapters,
    )


def adapter(name: str, tier: Tier, **more: Any) -> AdapterState:
    return AdapterState(
        AdapterId(name), digest=f"d-{name}", tier=tier, rank=8, size_bytes=99, **more
    )


@pytest.fixture
async def admin(valkey_url: str, tmp_path: Path) -> AsyncIterator[Running]:
    store = Store(valkey_url, prefix=f"{uuid.uuid4().hex}:", timeout_s=2)
    await store.start()
    registry, quota = Registry(store), Quota(store, QuotaConfig())
    ledger = Ledger(store, tmp_path / "spool")
    await registry.start()
    await ledger.start()
    dispatcher, now = dispatcher_of(GatewayConfig()), monotonic()
    for name in ("replica-0", "replica-1", "replica-2"):
        dispatcher.replica_added(ReplicaId(name), now)
    dispatcher.report(
        report("replica-0", adapter("org/poet", Tier.GPU), adapter("chef", Tier.DISK)), now
    )
    broken = adapter("broken", Tier.DISK, status=AdapterStatus.FAILED, reason="rank 512 over 64")
    dispatcher.report(report("replica-1", adapter("org/poet", Tier.HOST), broken), now)
    woken: list[bool] = []
    services = AdminServices(registry, quota, ledger, dispatcher, lambda: woken.append(True))
    app = web.Application()
    add_admin_routes(app, services, KEY)
    async with TestServer(app) as server:
        client = httpx.AsyncClient(
            base_url=str(server.make_url("")), headers={"Authorization": f"Bearer {KEY}"}
        )
        async with client as http:
            yield Running(http, registry, ledger, quota, dispatcher, woken)
    await quota.close()
    await ledger.close()
    await registry.close()
    await store.close()


# the key


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", KEY])
async def test_without_the_admin_key_nothing_is_told(admin: Running, given: str) -> None:
    for method, path in [("GET", "tenants"), ("POST", "tenants"), ("GET", "no/such/thing")]:
        error = await admin.refused(method, path, 401, headers={"Authorization": given})
        assert error["code"] == "invalid_api_key"


async def test_bytes_that_are_no_text_are_a_wrong_key(admin: Running) -> None:
    headers = [(b"Authorization", b"Bearer \xff\xfe")]
    assert (await admin.http.get("/admin/v1/tenants", headers=headers)).status_code == 401


async def test_a_tenants_key_is_no_admin_key(admin: Running) -> None:
    await admin.registry.create("acme")
    _, secret = await admin.registry.key_create("acme")
    await admin.refused("GET", "tenants", 401, headers={"Authorization": f"Bearer {secret}"})


async def test_without_a_configured_key_the_api_is_off(admin: Running) -> None:
    app = web.Application()
    services = AdminServices(
        admin.registry, admin.quota, admin.ledger, admin.dispatcher, lambda: None
    )
    add_admin_routes(app, services, "")
    async with TestServer(app) as server, httpx.AsyncClient() as http:
        for bearer in ("", "Bearer x"):
            url = str(server.make_url("/admin/v1/tenants"))
            reply = await http.get(url, headers={"Authorization": bearer})
            assert reply.status_code == 404
            assert "admin.key" in reply.json()["error"]["message"]


# tenants and keys


async def test_a_tenant_lives_from_create_to_delete(admin: Running) -> None:
    made = await admin.call(
        "POST",
        "tenants",
        201,
        json={"id": "acme", "weight": 2, "limits": {"tokens_per_min": 500}},
    )
    assert made["models"] == ["*"]
    assert made["limits"] == {**NO_LIMITS, "tokens_per_min": 500}
    changed = await admin.call(
        "PATCH",
        "tenants/acme",
        json={"models": ["org/poet", "tiny"], "limits": {"requests_per_min": 7}},
    )
    assert changed["limits"] == {**NO_LIMITS, "requests_per_min": 7, "tokens_per_min": 500}
    assert changed["weight"] == 2
    assert await admin.call("GET", "tenants/acme") == changed
    assert (await admin.call("GET", "tenants"))["data"] == [changed]
    await admin.call("DELETE", "tenants/acme", 204)
    await admin.refused("GET", "tenants/acme", 404)
    assert (await admin.call("GET", "tenants"))["data"] == []


async def test_a_key_that_clients_hold_already_can_be_imported(admin: Running) -> None:
    await admin.call("POST", "tenants", 201, json={"id": "acme"})
    made = await admin.call("POST", "tenants/acme/keys", 201, json={"secret": "sk-from-before"})
    assert made["secret"] == "sk-from-before"
    assert admin.registry.tenant_for_key("sk-from-before").id == "acme"
    error = await admin.refused("POST", "tenants/acme/keys", 400, json={"secret": "short"})
    assert error["param"] == "secret"
    error = await admin.refused("POST", "tenants/acme/keys", 400, json={"secret": 7})
    assert error["param"] == "secret"
    await admin.refused("POST", "tenants/acme/keys", 409, json={"secret": "sk-from-before"})


async def test_a_key_is_shown_once_and_works_until_revoked(admin: Running) -> None:
    await admin.call("POST", "tenants", 201, json={"id": "acme"})
    made = await admin.call("POST", "tenants/acme/keys", 201)
    secret = made["secret"]
    assert admin.registry.tenant_for_key(secret) is not None
    (listed,) = (await admin.call("GET", "tenants/acme/keys"))["data"]
    assert listed == {
        "id": made["id"],
        "prefix": secret[:7],
        "created": made["created"],
        "expires": None,
    }
    assert secret not in (await admin.http.get("/admin/v1/tenants/acme")).text
    await admin.call("DELETE", f"tenants/acme/keys/{made['id']}", 204)
    assert admin.registry.tenant_for_key(secret) is None
    await admin.refused("DELETE", f"tenants/acme/keys/{made['id']}", 404)


async def test_an_etag_guards_against_a_change_between(admin: Running) -> None:
    await admin.call("POST", "tenants", 201, json={"id": "acme"})
    etag = (await admin.http.get("/admin/v1/tenants/acme")).headers["ETag"]
    guard = {"If-Match": etag}
    await admin.call("PATCH", "tenants/acme", json={"weight": 3}, headers=guard)
    error = await admin.refused("PATCH", "tenants/acme", 412, json={"weight": 4}, headers=guard)
    assert "read it and try again" in error["message"]
    await admin.refused("DELETE", "tenants/acme", 412, headers=guard)
    await admin.call("DELETE", "tenants/acme", 204, headers={"If-Match": "*"})


async def test_ids_of_any_letters_can_be_addressed(admin: Running) -> None:
    for name in ("a b", "ä?#&%", "..."):
        await admin.call("POST", "tenants", 201, json={"id": name})
        reply = await admin.http.get(f"/admin/v1/tenants/{quote(name, safe='')}")
        assert reply.json()["id"] == name


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b"\xff", "body"),
        (b'{"id": "\\ud800"}', "body"),
        (b"{}", "id"),
        (b'{"id": 7}', "id"),
        (b'{"id": "a", "colour": 1}', "colour"),
        (b'{"id": "a", "weight": null}', "weight"),
        (b'{"id": "a", "weight": -1}', "weight"),
        (b'{"id": "a", "models": "x"}', "models"),
        (b'{"id": "a", "models": [1]}', "models"),
        (b'{"id": "a", "limits": 5}', "limits"),
        (b'{"id": "a", "limits": {"per_hour": 5}}', "limits.per_hour"),
        (b'{"id": "a", "limits": {"tokens_per_min": 1.5}}', "limits.tokens_per_min"),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field(
    admin: Running, body: bytes, param: str
) -> None:
    error = await admin.refused("POST", "tenants", 400, content=body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_a_second_tenant_of_one_name_is_a_conflict(admin: Running) -> None:
    await admin.call("POST", "tenants", 201, json={"id": "acme"})
    assert (await admin.refused("POST", "tenants", 409, json={"id": "acme"}))["code"] == "conflict"
    await admin.refused("PATCH", "tenants/nobody", 404, json={"weight": 1})
    await admin.refused("POST", "tenants/nobody/keys", 404)
    await admin.refused("GET", "tenants/nobody/quota", 404)


async def test_an_unknown_address_is_a_404_of_the_same_shape(admin: Running) -> None:
    for method, path in [("GET", "tenant"), ("PUT", "tenants/acme"), ("POST", "usage")]:
        assert path in (await admin.refused(method, path, 404))["message"]


async def test_quota_shows_what_is_left_and_takes_nothing(admin: Running) -> None:
    limits = {"requests_per_min": 10}
    await admin.call("POST", "tenants", 201, json={"id": "acme", "limits": limits})
    tenant = admin.registry.tenant("acme")
    assert tenant is not None
    await admin.quota.reserve(tenant, RequestId("r"), 5)
    for _ in range(3):
        left = await admin.call("GET", "tenants/acme/quota")
    assert [(line["name"], line["remaining"]) for line in left["limits"]] == [("requests", 9)]
    assert left["degraded"] is False


# the fleet


async def test_adapters_say_where_they_are_and_why_not(admin: Running) -> None:
    rows = {row["adapter"]: row for row in (await admin.call("GET", "adapters"))["data"]}
    assert list(rows) == ["broken", "chef", "org/poet"]
    poet = rows["org/poet"]
    assert (poet["status"], poet["rank"], poet["size_bytes"]) == ("ready", 8, 99)
    assert poet["replicas"] == ["replica-0", "replica-1"]
    assert [place["tier"] for place in poet["places"]] == ["gpu", "host"]
    assert not rows["broken"]["routable"]
    assert rows["broken"]["places"][0]["reason"] == "rank 512 over 64"
    assert await admin.call("GET", "adapters/org/poet") == poet
    assert await admin.call("GET", "adapters/org%2Fpoet") == poet
    await admin.refused("GET", "adapters/none", 404)


async def test_replicas_show_state_load_and_slots(admin: Running) -> None:
    first, second, third = (await admin.call("GET", "replicas"))["data"]
    assert (first["replica"], first["state"], first["resident"]) == (
        "replica-0",
        "up",
        ["org/poet"],
    )
    assert second["adapters"] == 1
    assert (third["state"], third["reported_s_ago"]) == ("unknown", None)
    residency = (await admin.call("GET", "residency"))["data"]
    assert [len(row["adapters"]) for row in residency] == [2, 2, 0]


async def test_a_drained_replica_takes_nothing_until_resumed(admin: Running) -> None:
    await admin.registry.create("acme")
    drained = await admin.call("POST", "replicas/replica-0/drain")
    assert drained["state"] == "draining"
    assert admin.woken == [True]
    where = await admin.call("GET", "explain?tenant=acme&model=org/poet")
    assert where["chosen"] == "replica-1"
    assert (await admin.call("POST", "replicas/replica-0/resume"))["state"] == "up"
    await admin.refused("POST", "replicas/replica-9/drain", 404)


# questions


async def test_explain_names_the_winner_and_what_it_was_weighed_by(admin: Running) -> None:
    await admin.registry.create("acme")
    found = await admin.call("GET", "explain", params={"tenant": "acme", "model": "chef"})
    assert found["chosen"] == "replica-0"
    terms = {one["replica"]: one for one in found["candidates"]}
    assert terms["replica-0"]["tier"] == "disk"
    assert terms["replica-0"]["expected_s"] > 0
    assert terms["replica-1"]["refused"] == "absent"
    base = await admin.call("GET", "explain", params={"tenant": "acme", "model": "tiny"})
    assert base["chosen"] in ("replica-0", "replica-1")


async def test_explain_does_not_tell_unknown_from_forbidden(admin: Running) -> None:
    await admin.registry.create("acme", models=["chef"])
    answers = []
    for model in ("org/poet", "no/poet"):
        params = {"tenant": "acme", "model": model}
        error = await admin.refused("GET", "explain", 404, params=params)
        answers.append(str(error).replace(model, "MODEL"))
    assert answers[0] == answers[1]
    assert "model_not_found" in answers[0]
    error = await admin.refused("GET", "explain", 400, params={"tenant": "acme"})
    assert error["param"] == "model"


async def test_usage_counts_what_the_ledger_has(admin: Running) -> None:
    now = wall()
    for n in range(3):
        who = (RequestId(str(n)), TenantId("acme"), "chef", "d", ReplicaId("replica-0"))
        admin.ledger.record(Record(*who, 5, 0, 7, 0.0, 0.1, 0.2, "ok", False, now))
    found = await admin.call("GET", "usage", params={"by": "tenant,adapter"})
    (row,) = found["data"]
    assert (row["tenant"], row["adapter"]) == ("acme", "chef")
    assert (row["requests"], row["completion_tokens"]) == (3, 21)
    tomorrow = datetime.fromtimestamp(now + 86_400, UTC).isoformat()
    assert (await admin.call("GET", "usage", params={"from": tomorrow}))["data"] == []
    unix = await admin.call("GET", "usage", params={"from": str(int(now) - 60), "to": str(now + 1)})
    assert unix["data"][0]["requests"] == 3


@pytest.mark.parametrize(
    ("param", "value"),
    [("from", "yesterday"), ("to", "1e400"), ("from", "0"), ("by", "tenant,colour")],
)
async def test_a_bad_question_names_its_parameter(admin: Running, param: str, value: str) -> None:
    assert (await admin.refused("GET", "usage", 400, params={param: value}))["param"] == param


async def test_while_the_store_is_away_reads_go_on_and_changes_say_so(tmp_path: Path) -> None:
    store = Store(f"unix://{tmp_path}/none")
    registry, quota = Registry(store), Quota(store, QuotaConfig())
    ledger = Ledger(store, tmp_path / "spool")
    app = web.Application()
    dispatcher = dispatcher_of(GatewayConfig())
    add_admin_routes(app, AdminServices(registry, quota, ledger, dispatcher, lambda: None), KEY)
    async with TestServer(app) as server:
        client = httpx.AsyncClient(
            base_url=str(server.make_url("")), headers={"Authorization": f"Bearer {KEY}"}
        )
        async with client as http:
            it = Running(http, registry, ledger, quota, dispatcher, [])
            assert (await it.call("GET", "tenants"))["data"] == []
            assert (await it.call("GET", "replicas"))["data"] == []
            error = await it.refused("POST", "tenants", 503, json={"id": "acme"})
            assert error["code"] == "store_away"
            await it.refused("GET", "usage", 503)
    await store.close()
