"""Desired adapters on real sockets: loaded before routed, again after a restart, unloaded after."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from scripted import until
from served import Served
from typer.testing import CliRunner, Result

from gateway.adapter_records import AdapterVersion
from gateway.app import Gateway
from gateway.cli.root import app
from gateway.config import GatewayConfig
from shared.messages import AdapterState, AdapterStatus

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
    server: Served, store: str, folder: Path, kind: str = "vllm"
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    entry = {"id": "one", "url": f"http://127.0.0.1:{server.port}", "kind": kind, "slots": 2}
    config = GatewayConfig.model_validate(
        {
            "listen": {"port": 0},
            "admin": {"key": ADMIN_KEY},
            "store": {"url": store, "prefix": f"t{uuid4().hex}:", "spool": folder / "spool"},
            "fleet": {"replicas": [entry]},
        }
    )
    gateway = Gateway(config)
    await gateway.start()
    try:
        await gateway.registry.create("acme")
        _, key = await gateway.registry.key_create("acme")
        await until(lambda: gateway.pump.dispatcher.bases())
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as http:
            yield gateway, http
    finally:
        await gateway.close()


def place(gateway: Gateway) -> AdapterState | None:
    (view,) = gateway.pump.dispatcher.view(gateway.pump.clock())
    return next((one for one in view.adapters if one.adapter == "pirate"), None)


def version(gateway: Gateway) -> str:
    state = place(gateway)
    return "" if state is None else state.digest


async def ask(http: httpx.AsyncClient) -> httpx.Response:
    body = {"model": "pirate", "messages": [{"role": "user", "content": "hi"}]}
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
        assert "host (inferred)" in said.output
        shown = await loraplex(gateway, "adapter", "show", "pirate", "--json")
        assert '"inferred": true' in shown.output
