"""The admin API's document: it names every route, and a machine that reads it finds no fault."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks

from gateway.admin.api import AdminServices, add_admin_routes
from gateway.admin.document import OPERATIONS, document
from gateway.admin.joins import Joins, add_join_routes
from gateway.config import DiscoveryConfig, GatewayConfig, QuotaConfig
from gateway.discovery.joining import Joining
from gateway.edge.throttle import Throttle
from gateway.fleet.deciding import dispatcher_of
from gateway.state.ledger import Ledger
from gateway.state.quota import Quota
from gateway.state.registry import Registry
from gateway.store.redis import Store
from shared.clock import monotonic
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, ReplicaReport, Tier
from shared.wire import FLEET_TOKEN

KEY = "operators-only"
TOKEN = "the-fleet's"
EXAMPLES = 6  # of each operation


def services(store: Store, folder: Path) -> AdminServices:
    dispatcher, now = dispatcher_of(GatewayConfig()), monotonic()
    dispatcher.replica_added(ReplicaId("0"), now)
    state = AdapterState(AdapterId("0"), digest="0123456789ab", tier=Tier.GPU)
    dispatcher.report(
        ReplicaReport(
            replica=ReplicaId("0"),
            boot="b",
            seq=1,
            base="tiny",
            slots=4,
            capacity=8,
            running=0,
            waiting=0,
            pages_total=9,
            pages_free=9,
            max_model_len=512,
            heartbeat_s=1000,
            adapters=(state,),
        ),
        now,
    )
    return AdminServices(
        Registry(store),
        Quota(store, QuotaConfig()),
        Ledger(store, folder / "spool"),
        dispatcher,
        lambda: None,
        throttle=Throttle(10**6),  # a machine that guesses keys is not what is tried here
    )


def routed(store: Store, its: AdminServices) -> web.Application:
    """Both parts of the document, as a gateway routes them."""
    app = web.Application()
    joining = Joining(store, DiscoveryConfig(), told=lambda entries: None)
    joins = Joins(joining, lease_s=15, listed=lambda replica: False)
    add_join_routes(app, joins, TOKEN, its.throttle)
    add_admin_routes(app, its, KEY)
    return app


@pytest.fixture
async def server(valkey_url: str, tmp_path: Path) -> AsyncIterator[str]:
    store = Store(valkey_url, prefix=f"{uuid.uuid4().hex}:", timeout_s=2)
    await store.start()
    its = services(store, tmp_path)
    await its.registry.start()
    await its.registry.create("0")  # the name that is tried first everywhere
    async with TestServer(routed(store, its)) as running:
        yield str(running.make_url(""))
    await its.quota.close()
    await its.registry.close()
    await store.close()


async def test_the_document_names_every_route_and_no_other(server: str, valkey_url: str) -> None:
    store = Store(valkey_url)
    app = routed(store, services(store, Path("unused")))
    found = {
        (route.method, re.sub(r"{(\w+):[^}]*}", r"{\1}", route.resource.canonical))
        for route in app.router.routes()
        if route.resource is not None and "/v1/" in route.resource.canonical
    }
    described = {(one.method, one.root + one.path) for one in OPERATIONS}
    assert {pair for pair in found if pair[0] not in ("HEAD", "*")} == described
    async with httpx.AsyncClient(verify=False) as http:
        said = await http.get(
            f"{server}/admin/openapi.json", headers={"authorization": f"Bearer {KEY}"}
        )
    assert said.json() == document()
    await store.close()


CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
)


async def test_a_machine_that_reads_the_document_gets_no_500_and_no_other_shape(
    server: str,
) -> None:
    """schemathesis, on the real server: bodies and parameters that fit the document, and others."""
    schema = schemathesis.openapi.from_dict(document())
    keys = {"Authorization": f"Bearer {KEY}", FLEET_TOKEN: TOKEN}
    schema.config.update(base_url=server, headers=keys)

    def tried(operation: Any, mode: schemathesis.GenerationMode) -> None:
        @settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        call()

    def all_of_them() -> int:
        count = 0
        for result in schema.get_all_operations():
            operation = result.ok()
            for mode in schemathesis.GenerationMode:
                try:
                    tried(operation, mode)
                except Unsatisfiable:  # one that takes nothing cannot be asked wrongly
                    if mode is schemathesis.GenerationMode.POSITIVE:
                        faults.append(f"{operation.label}: nothing fits the document")
                except (Exception, BaseExceptionGroup) as error:
                    faults.append(f"{operation.label} {mode.value}: {error}")
            count += 1
        return count

    faults: list[str] = []
    assert await asyncio.to_thread(all_of_them) == len(OPERATIONS)
    assert not faults, "\n\n".join(faults)
