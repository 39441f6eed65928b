"""Desired adapters on real sockets: loaded before routed, again after a restart, unloaded after."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from scripted import until
from served import Records, Served, record
from typer.testing import CliRunner, Result

from gateway.app import Gateway
from gateway.cli.root import app
from gateway.config import GatewayConfig
from gateway.core.deployment import Deployment
from gateway.edge.upstream import Upstream
from gateway.engines.deploy import Deployer
from gateway.engines.deploy_native import NativePlace
from gateway.fleet.deciding import dispatcher_of
from gateway.state.adapter_records import AdapterVersion
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

R0 = ReplicaId("replica-0")
ADMIN_KEY = "admin-key-for-the-test"
ONE, TWO = "0123456789abcdef", "fedcba9876543210"


class VLLM(Served):
    """Loads and lists as vLLM does (a transcript of release 0.32); `fault` is what it answers 500
    with, and a completion names the model it was asked for."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.fault = ""
        super().__init__(
            {
                "/v1/models": lambda _: (200, {"data": [*self._models()]}),
                "/v1/load_lora_adapter": self._load,
                "/v1/unload_lora_adapter": self._unload,
                "/v1/chat/completions": self._complete,
            }
        )

    def _models(self) -> list[dict[str, Any]]:
        adapters = [{"id": name, "parent": "base"} for name in self.loaded]
        return [{"id": "base", "parent": None, "max_model_len": 99}, *adapters]

    def _load(self, body: Any) -> tuple[int, Any]:
        name = body["lora_name"]
        if self.fault:
            return 500, {"error": {"message": self.fault, "type": "InternalServerError"}}
        if name in self.loaded:
            return 400, {"error": {"message": f"'{name}' has already been loaded."}}
        self.loaded[name] = body["lora_path"]
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, body: Any) -> tuple[int, Any]:
        del self.loaded[body["lora_name"]]
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def _complete(self, body: Any) -> tuple[int, Any]:
        model = body["model"]
        if model != "base" and model not in self.loaded:
            return 404, {"error": {"message": f"The model `{model}` does not exist."}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return 200, {"model": model, "choices": [], "usage": usage}


@asynccontextmanager
async def gateway_on(
    server: Served,
    store: str,
    folder: Path,
    others: Sequence[dict[str, Any]] = (),
    prefix: str = "",
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    url = f"http://127.0.0.1:{server.port}"
    entry = {"id": "one", "url": url, "kind": "vllm", "api_key": "k3y"}
    config = GatewayConfig.model_validate(
        {
            "listen": {"port": 0},
            "admin": {"key": ADMIN_KEY},
            "store": {
                "url": store,
                "prefix": prefix or f"t{uuid4().hex}:",
                "spool": folder / uuid4().hex,
            },
            "fleet": {"replicas": [entry, *others]},
        }
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        if not gateway.registry.tenants():
            await gateway.registry.create("acme")
        _, key = await gateway.registry.key_create("acme")
        await until(lambda: gateway.pump.dispatcher.bases())
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
            yield gateway, http
    finally:
        await gateway.close()


def place(gateway: Gateway) -> AdapterState | None:
    view, *_ = gateway.pump.dispatcher.view(gateway.pump.clock())
    return next((one for one in view.adapters if one.adapter == "pirate"), None)


def version(gateway: Gateway) -> str:
    state = place(gateway)
    return "" if state is None else state.digest


async def ask(http: httpx.AsyncClient, model: str = "pirate") -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return await http.post("/v1/chat/completions", json=body)


async def test_an_adapter_is_loaded_then_routed_and_survives_a_restart_and_a_new_version(
    valkey_url: str, tmp_path: Path
) -> None:
    async with VLLM() as server, gateway_on(server, valkey_url, tmp_path) as (gateway, http):
        assert (await ask(http)).status_code == 404
        await gateway.registry.adapter_version("pirate", AdapterVersion(ONE, "/p/1"))
        await until(lambda: version(gateway) == ONE)
        assert server.loaded == {"pirate@0123456789ab": "/p/1"}
        answer = await ask(http)
        assert (answer.status_code, answer.json()["model"]) == (200, "pirate")
        assert answer.headers["x-loraplex-adapter-version"] == ONE
        assert server.sent("/v1/chat/completions")[-1]["model"] == "pirate@0123456789ab"

        server.loaded.clear()  # it was started anew, and lists nothing
        await until(lambda: server.loaded)
        await until(lambda: version(gateway) == ONE)

        await gateway.registry.adapter_version("pirate", AdapterVersion(TWO, "/p/2"))
        await until(lambda: [*server.loaded] == ["pirate@fedcba987654"])
        assert (await ask(http)).headers["x-loraplex-adapter-version"] == TWO
        assert server.keys == {"Bearer k3y"}, "its own key with all it is sent, no tenant's"

        await gateway.registry.adapter_delete("pirate")
        await until(lambda: not server.loaded)
        await until(lambda: place(gateway) is None)


async def test_a_refused_load_is_shown_with_the_servers_words(
    valkey_url: str, tmp_path: Path
) -> None:
    async with VLLM() as server, gateway_on(server, valkey_url, tmp_path) as (gateway, http):
        server.fault = "LoRA rank 128 is greater than max_lora_rank 64."
        await gateway.registry.adapter_version("pirate", AdapterVersion(ONE, "/p/1"))
        await until(lambda: place(gateway) is not None)
        state = place(gateway)
        assert state is not None
        assert (state.status, state.reason) == (AdapterStatus.FAILED, server.fault)
        assert (await ask(http)).status_code == 404


async def test_a_new_version_that_is_refused_is_shown_failed_beside_the_old_that_serves(
    valkey_url: str, tmp_path: Path
) -> None:
    async with VLLM() as server, gateway_on(server, valkey_url, tmp_path) as (gateway, http):
        await gateway.registry.adapter_version("pirate", AdapterVersion(ONE, "/p/1"))
        await until(lambda: version(gateway) == ONE)
        assert await shown(gateway, http) == ("ready", True, ONE, [], [("one", ONE, "ready", "")])
        server.fault = "LoRA rank 128 is greater than max_lora_rank 64."
        await gateway.registry.adapter_version("pirate", AdapterVersion(TWO, "/p/2"))
        await until(lambda: gateway.members.refused(ReplicaId("one")))
        both = [("one", ONE, "ready", ""), ("one", TWO, "failed", server.fault)]
        wanted = ("failed", False, TWO, [ONE], both)
        seen = await shown(gateway, http)
        async with asyncio.timeout(30):  # a server that answers late is taken for one that was away
            while seen != wanted:
                await asyncio.sleep(0.05)
                seen = await shown(gateway, http)
        told = (await loraplex(gateway, "adapter", "show", "pirate")).output
        assert server.fault in told
        assert "current, failed" in told
        assert f"served as pirate@{ONE[:12]}" in told
        assert (await ask(http)).status_code == 503  # what it says is what is done
        assert (await ask(http, f"pirate@{ONE[:12]}")).status_code == 200
        await gateway.registry.adapter_switch("pirate")
        await until(lambda: not gateway.members.refused(ReplicaId("one")))
        assert await shown(gateway, http) == ("ready", True, ONE, [], both[:1])


async def shown(gateway: Gateway, http: httpx.AsyncClient) -> tuple[Any, ...]:
    """Of pirate, in the list and by its name alike: what its name means, and its places."""
    headers, url = {"authorization": f"Bearer {ADMIN_KEY}"}, f"{gateway.admin_url}/admin/v1/"
    row = (await http.get(f"{url}adapters/pirate", headers=headers)).json()
    assert (await http.get(f"{url}adapters", headers=headers)).json()["data"] == [row]
    assert row["replicas"] == ["one"]
    told = ("replica", "digest", "status", "reason")
    places = [tuple(one[name] for name in told) for one in row["places"]]
    return row["status"], row["routable"], row["digest"], row["others"], places


async def loraplex(gateway: Gateway, *words: str) -> Result:
    environment = {"LORAPLEX_ADMIN_KEY": ADMIN_KEY, "LORAPLEX_GATEWAY": gateway.admin_url}
    return await asyncio.to_thread(CliRunner(env=environment).invoke, app, words)


async def test_add_waits_until_it_is_routable_or_tells_the_servers_reason(
    valkey_url: str, tmp_path: Path
) -> None:
    async with VLLM() as server, gateway_on(server, valkey_url, tmp_path) as (gateway, http):
        server.fault = "vLLM does not yet support DoRA."
        add = ("adapter", "add", "pirate", "/p/1", "--digest", ONE, "--wait")
        refused = await loraplex(gateway, *add, "2.5")
        assert refused.exit_code == 1
        assert f"one: {server.fault}" in str(refused.exception)
        server.fault = ""
        done = await loraplex(gateway, *add, "60")
        assert done.exit_code == 0, done.exception
        assert (await ask(http)).status_code == 200
        gone = await loraplex(gateway, "adapter", "remove", "pirate", "--yes")
        assert gone.exit_code == 0, gone.exception
        assert not server.loaded
        assert (await ask(http)).status_code == 404


async def test_explain_and_residency_say_what_is_inferred(valkey_url: str, tmp_path: Path) -> None:
    async with VLLM() as server, gateway_on(server, valkey_url, tmp_path) as (gateway, _):
        await gateway.registry.adapter_version("pirate", AdapterVersion(ONE, "/p/1"))
        await until(lambda: version(gateway) == ONE)
        said = await loraplex(gateway, "explain", "--tenant", "acme", "--model", "pirate")
        assert "gpu (inferred)" in said.output
        shown = await loraplex(gateway, "adapter", "show", "pirate", "--json")
        assert '"inferred": true' in shown.output


async def test_a_replica_of_ours_is_given_what_it_does_not_list_by_the_same_calls() -> None:
    said = "No adapter found for /p/1"
    loads: list[tuple[int, Any]] = [(404, {"error": {"message": said, "code": 404}})]
    given: dict[str, str] = {}

    def load(body: Any) -> tuple[int, Any]:
        if loads:
            return loads.pop()
        given[body["lora_name"]] = {"/p/1": ONE, "/p/2": TWO}[body["lora_path"]]
        return 200, "Success: LoRA adapter 'pirate' added successfully."

    def unload(body: Any) -> tuple[int, Any]:
        del given[body["lora_name"]]
        return 200, "Success: LoRA adapter 'pirate' removed successfully."

    pages: dict[str, Any] = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}
    registry, dispatcher = Records(record("pirate", (ONE, "/p/1"))), dispatcher_of(GatewayConfig())
    dispatcher.replica_added(R0, 0.0)
    async with Served(pages) as server:
        upstream = Upstream(f"http://127.0.0.1:{server.port}", connect_timeout_s=1)
        place = NativePlace(R0, upstream, dispatcher, registry.desired, token="")
        deployer = Deployer(
            place,
            registry,
            takes=lambda: lambda adapter: True,
            in_use=dispatcher.in_use,
            deployment=Deployment(first_s=0.05),
            look_s=0.02,
        )
        task, numbers = asyncio.ensure_future(deployer.run()), itertools.count(1)

        def lists(digest: str) -> bool:
            """After its next report."""
            states = [AdapterState(AdapterId(n), d, Tier.HOST) for n, d in given.items()]
            dispatcher.report(reported(next(numbers), *states), 0.0)
            return dispatcher.digest_at(R0, AdapterId("pirate")) == (digest or None)

        assert await silence(server), "it has not reported yet"
        lists("")
        await until(lambda: place.failures == {"pirate": refused("pirate", ONE, said)})
        await until(lambda: lists(ONE))
        await until(lambda: not place.failures)
        registry.by_name["pirate"] = record("pirate", (ONE, "/p/1"), (TWO, "/p/2"))
        await until(lambda: lists(TWO))
        sent = server.sent("/v1/load_lora_adapter")
        assert [(one["lora_path"], one["load_inplace"]) for one in sent] == [
            ("/p/1", False),
            ("/p/1", False),
            ("/p/2", True),
        ]
        del registry.by_name["pirate"]
        await until(lambda: lists(""))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        upstream.close()


async def test_nothing_is_loaded_while_it_may_be_another_bases(
    valkey_url: str, tmp_path: Path
) -> None:
    one, two = VLLM(), VLLM()
    two.pages["/v1/models"] = (200, {"data": [{"id": "another", "parent": None}]})
    others: list[dict[str, Any]] = [{"id": "two", "kind": "vllm", "deploy": ["pir*"]}]
    async with one, two:
        others[0]["url"] = f"http://127.0.0.1:{two.port}"
        async with gateway_on(one, valkey_url, tmp_path, others) as (gateway, _):
            await gateway.registry.adapter_version("pirate", AdapterVersion(ONE, "/p/1"))
            await until(lambda: two.loaded)
            await until(lambda: len(gateway.pump.dispatcher.bases()) == 2)
            await asyncio.sleep(1.1)  # a look
        assert not one.loaded


async def test_of_several_gateways_one_at_a_time_acts_on_a_server(
    valkey_url: str, tmp_path: Path
) -> None:
    at_once: list[int] = []

    class Slow(VLLM):
        running = 0

        async def slow(self, body: Any) -> tuple[int, Any]:
            self.running += 1
            at_once.append(self.running)
            await asyncio.sleep(0.3)
            self.running -= 1
            return self._load(body)

    prefix = f"t{uuid4().hex}:"
    async with Slow() as server:
        server.pages["/v1/load_lora_adapter"] = server.slow
        async with (
            gateway_on(server, valkey_url, tmp_path, prefix=prefix) as (one, _),
            gateway_on(server, valkey_url, tmp_path, prefix=prefix) as (two, _),
        ):
            for name in "abcdef":
                await one.registry.adapter_version(name, AdapterVersion(ONE, f"/p/{name}"))
            await until(lambda: len(server.loaded) == 6, within_s=20)
            both = (one, two)
            await until(lambda: all(len(g.pump.dispatcher.adapters()) == 6 for g in both))
            server.fault = "vLLM does not yet support DoRA."
            await one.registry.adapter_version("dora", AdapterVersion(ONE, "/p/dora"))
            told = {"dora": refused("dora", ONE, server.fault)}
            places = [gateway.members._places[ReplicaId("one")] for gateway in both]
            await until(lambda: all(place.failures == told for place in places), within_s=20)
    assert max(at_once) == 2, "what one gateway does at a time, however many there are"


async def silence(server: Served) -> bool:
    await asyncio.sleep(0.1)
    return not server.asked


def refused(adapter: str, digest: str, why: str) -> AdapterState:
    return AdapterState(AdapterId(adapter), digest, Tier.DISK, AdapterStatus.FAILED, reason=why)


def reported(seq: int, *adapters: AdapterState) -> ReplicaReport:
    return ReplicaReport(
        replica=R0,
        boot="b",
        seq=seq,
        base="base",
        slots=2,
        capacity=4,
        running=0,
        waiting=0,
        pages_total=0,
        pages_free=0,
        max_model_len=99,
        heartbeat_s=100.0,
        adapters=adapters,
    )
