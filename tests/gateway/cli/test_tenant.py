"""`loraplex tenant …` against a real admin API, and what is refused before any request."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from gateway.admin.api import AdminServices, add_admin_routes
from gateway.cli.failure import USAGE, Failure
from gateway.cli.root import app
from gateway.config import GatewayConfig, QuotaConfig
from gateway.fleet.deciding import dispatcher_of
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota
from gateway.state.registry import Registry
from gateway.state.tenants import Limits
from gateway.store.redis import Store

KEY = "operators-only"
NOBODY = "http://127.0.0.1:1"  # a request to it would fail with another exit code


def run(url: str, *words: str) -> tuple[int, str]:
    here = {"LORAPLEX_ADMIN_KEY": KEY, "LORAPLEX_GATEWAY": url}
    result = CliRunner().invoke(app, list(words), env=here)
    if isinstance(result.exception, Failure):
        return result.exception.code, str(result.exception)
    return result.exit_code, result.stdout


@pytest.fixture
async def gateway(valkey_url: str, tmp_path: Path) -> AsyncIterator[str]:
    """The admin API of a gateway with one tenant, `acme`, that has one key."""
    store = Store(valkey_url, prefix=f"{uuid.uuid4().hex}:", timeout_s=2)
    await store.start()
    registry, quota = Registry(store), Quota(store, QuotaConfig())
    await registry.start()
    await registry.create("acme", limits=Limits(requests_per_min=60, tokens_per_min=None))
    await registry.key_create("acme")
    ledger = Ledger(store, tmp_path / "spool")
    services = AdminServices(registry, quota, ledger, dispatcher_of(GatewayConfig()), lambda: None)
    server = web.Application()
    add_admin_routes(server, services, KEY)
    async with TestServer(server) as running:
        yield str(running.make_url(""))
    await quota.close()
    await registry.close()
    await store.close()


async def test_a_tenant_is_shown_with_what_is_left_and_when_its_keys_were_made(
    gateway: str,
) -> None:
    code, output = await asyncio.to_thread(run, gateway, "tenant", "show", "acme")
    assert code == 0
    assert any(line.split() == ["requests", "-", "60", "60"] for line in output.splitlines())
    assert " UTC" in output


async def test_what_is_left_is_in_the_json_too(gateway: str) -> None:
    _, output = await asyncio.to_thread(run, gateway, "tenant", "show", "acme", "--json")
    shown = json.loads(output)
    [line] = shown["left"]["limits"]
    assert (line["name"], line["remaining"]) == ("requests", 60)
    assert isinstance(shown["keys"][0]["created"], float)


@pytest.mark.parametrize("weight", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("verb", ["create", "set"])
def test_a_weight_that_is_not_finite_is_a_usage_error(verb: str, weight: str) -> None:
    code, said = run(NOBODY, "tenant", verb, "acme", "--weight", weight)
    assert (code, said) == (USAGE, f"--weight {weight}: a finite number above 0.")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("key-revoke", "acme", ""), "KEY_ID"),
        (("key-revoke", "", "k"), "TENANT"),
        (("show", " "), "TENANT"),
        (("delete", "", "--yes"), "TENANT"),
    ],
)
def test_an_empty_name_is_a_usage_error_before_any_request(
    words: tuple[str, ...], named: str
) -> None:
    assert run(NOBODY, "tenant", *words) == (USAGE, f"{named} is empty: name one.")
