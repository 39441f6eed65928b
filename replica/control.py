"""Calls that show or change the replica: models, adapters, reports, drain, health, metrics.

`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` take and answer what vLLM's do. A 200 comes
after the fact: a loaded adapter can be named by the next request, an unloaded one by none, and its
slot and host memory are free unless a running sequence still holds them.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
from aiohttp import web
from pydantic import AfterValidator, Field

from replica.config import ReplicaConfig
from replica.edge import check_fleet, error_response, json_response, read_object
from replica.engine.adapter_store import BadAdapter, HostAdapter
from replica.errors import BadAdapterRequest, EngineFailed, UnknownAdapter, UnknownModel
from replica.front import Front
from replica.metrics import Metrics
from replica.protocol import Body, parse
from replica.source import NOT_FOUND, Source
from replica.watch import StoreWatch
from shared.clock import wall
from shared.ids import AdapterId
from shared.messages import AdapterState, Tier
from shared.wire import (
    ADAPTERS_PATH,
    DRAIN_PATH,
    LOAD_PATH,
    PIN_PATH,
    PREFETCH_PATH,
    REPORTS_PATH,
    UNLOAD_PATH,
    encode_report,
)


def _name(name: str) -> str:
    parts = name.split("/")
    if not name.isprintable() or "," in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError("has an empty or dotted part, a comma or a control character")
    return name


B = TypeVar("B", bound=Body)
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_name)]


class LoadRequest(Body):
    lora_name: Name
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None
    pinned: bool | None = None
    digest: str | None = Field(None, max_length=128)  # ours: refuse any other content


_STAGE: Final = "(on trial)"


class UnloadRequest(Body):
    lora_name: str = Field(min_length=1, max_length=256)


class PinRequest(Body):
    adapter: str = Field(min_length=1, max_length=256)
    pinned: bool = True


class PrefetchRequest(Body):
    adapters: list[str] = Field(min_length=1, max_length=4096)
    tier: Literal["host", "gpu"] = "host"


class DrainRequest(Body):
    draining: bool = True


class Control:
    """`source` is read on `readers`, and asked to bring what is far away on `downloads`."""

    def __init__(
        self,
        *,
        config: ReplicaConfig,
        front: Front,
        watch: StoreWatch,
        source: Source,
        readers: Executor,
        downloads: Executor,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._front = front
        self._watch = watch
        self._source = source
        self._readers = readers
        self._downloads = downloads
        self._metrics = metrics
        self._created = int(wall())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.get(ADAPTERS_PATH, self.adapters),
            web.post(LOAD_PATH, self.load),
            web.post(UNLOAD_PATH, self.unload),
            web.post(PIN_PATH, self.pin),
            web.post(PREFETCH_PATH, self.prefetch),
            web.post(DRAIN_PATH, self.drain),
            web.get(REPORTS_PATH, self.reports),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
        ]

    # --- what is served

    async def models(self, request: web.Request) -> web.Response:
        names = [name for name in self._front.adapters if self._front.servable(name)]
        bases = [] if self._config.merged else [self._base_model()]
        data = [*bases, *map(self._adapter_model, names)]
        return json_response(orjson.dumps({"object": "list", "data": data}))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name == self._config.base_name and not self._config.merged:
            return json_response(orjson.dumps(self._base_model()))
        if not self._front.servable(name):
            raise UnknownModel(name)
        return json_response(orjson.dumps(self._adapter_model(name)))

    async def adapters(self, request: web.Request) -> web.Response:
        data = [self._adapter(state) for state in self._front.adapters.values()]
        return json_response(orjson.dumps({"object": "list", "data": data}))

    def _adapter(self, state: AdapterState) -> dict[str, Any]:
        return _adapter_object(state, self._front.canary_of(state))

    def _base_model(self) -> dict[str, Any]:
        name = self._config.base_name
        length = self._front.report.max_model_len
        return self._model(name, root=name, parent=None) | {"max_model_len": length}

    def _adapter_model(self, name: str) -> dict[str, Any]:
        return self._model(name, root=name, parent=self._config.base_name)

    def _model(self, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
        owner = {"object": "model", "created": self._created, "owned_by": "loraplex"}
        return {"id": name, **owner, "root": root, "parent": parent}

    # --- what changes it

    async def load(self, request: web.Request) -> web.Response:
        body = await self._order(request, LoadRequest)
        name, folder = AdapterId(body.lora_name), self._folder(body)
        in_place = bool(body.load_inplace)
        await self._front.check_load(name, folder, in_place=in_place)
        run = asyncio.get_running_loop().run_in_executor
        try:
            await run(self._downloads, self._source.fetch, folder)
            async with self._watch.alone:
                host = await run(self._readers, self._source.read, folder)
                if body.digest is not None and host.digest != body.digest:
                    text = f"its content is {host.digest}, not {body.digest}: upload it again"
                    raise BadAdapter("digest_mismatch", text, "digest")
                fault = await self._rehearsed(name, folder, host)
                if fault is not None:
                    raise _not_loaded(name, fault)
                trial = await self._front.load(
                    name, folder, host, in_place=in_place, pinned=body.pinned
                )
            fault = await self._front.outcome(trial)
        except BadAdapter as bad:
            raise _not_loaded(name, bad) from None
        if fault is not None:
            state = self._front.adapters.get(name)
            if name != folder and state is not None and state.reason == str(fault):
                await self._front.unload(name)  # a name that only this call gave
            raise _not_loaded(name, fault)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _rehearsed(
        self, name: AdapterId, folder: AdapterId, host: HostAdapter
    ) -> Exception | None:
        """What new content for a name that is served dies of: under another name, so that the old
        goes on answering until the new one has lived, and if it has not."""
        served = self._front.adapters.get(name)
        if served is None or not self._front.servable(name) or served.digest == host.digest:
            return None
        stage = AdapterId(f"{name} {_STAGE}")
        trial = await self._front.load(stage, folder, host, in_place=True, pinned=None)
        try:
            return await self._front.outcome(trial)
        finally:
            await self._front.unload(stage)

    async def unload(self, request: web.Request) -> web.Response:
        body = await self._order(request, UnloadRequest)
        await self._front.unload(AdapterId(body.lora_name))
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def pin(self, request: web.Request) -> web.Response:
        body = await self._order(request, PinRequest)
        await self._front.pin(AdapterId(body.adapter), body.pinned)
        return json_response(orjson.dumps(self._adapter(self._front.adapters[body.adapter])))

    async def prefetch(self, request: web.Request) -> web.Response:
        """202: begun, not done; reports say when a copy has arrived. `gpu`: free slots only."""
        body = await self._order(request, PrefetchRequest)
        names = [AdapterId(name) for name in body.adapters]
        await self._front.prefetch(names, Tier(body.tier))
        return json_response(orjson.dumps({"prefetching": body.adapters}), status=202)

    async def drain(self, request: web.Request) -> web.Response:
        body = await self._order(request, DrainRequest)
        self._front.drain(body.draining)
        report = self._front.report
        state = {"running": report.running, "waiting": report.waiting}
        return json_response(orjson.dumps({"draining": body.draining, **state}))

    async def _order(self, request: web.Request, kind: type[B]) -> B:
        check_fleet(request, self._config.fleet_token)
        if self._config.merged and kind is not DrainRequest:
            raise BadAdapterRequest(
                f"This replica has the adapter '{self._config.merged}' merged into its base: "
                "adapters come and go on replicas without --merged.",
                code="merged",
            )
        return parse(kind, await read_object(request) if request.can_read_body else {})

    def _folder(self, body: LoadRequest) -> AdapterId:
        try:
            return self._source.locate(body.lora_path)
        except BadAdapter as bad:
            raise _not_loaded(body.lora_name, bad) from None

    # --- what it says of itself

    async def reports(self, request: web.Request) -> web.StreamResponse:
        """A report at once, then each as it comes; the same again rather than silence.

        A step may take longer than a heartbeat; only one that is taken for stalled ends the stream.
        """
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.headers["Cache-Control"] = "no-cache"
        await response.prepare(request)
        seen = -1
        while not self._front.ailment() and not self._front.closing:
            report = await self._front.next_report(seen, self._config.heartbeat_s)
            await response.write(encode_report(report))
            seen = report.seq
        if self._front.closing:  # who follows it shall know that it went on purpose
            await response.write(encode_report(self._front.goodbye()))
        await response.write_eof()
        return response

    async def health(self, request: web.Request) -> web.Response:
        ailment = self._front.ailment()
        if ailment:
            return error_response(EngineFailed(ailment))
        status = "draining" if self._front.draining else "ok"
        return json_response(orjson.dumps({"status": status, "replica": self._config.name}))

    async def metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._metrics.render(), headers=headers)


def _not_loaded(name: str, fault: Exception) -> BadAdapterRequest | UnknownAdapter:
    """What a load call answers; vLLM says it in these words, and 404 only to what is not there."""
    if not isinstance(fault, BadAdapter):
        return BadAdapterRequest(f"Loading lora {name} failed: {fault}", param="lora_path")
    text = f"Loading lora {name} failed: {fault.message}"
    if fault.code == NOT_FOUND:
        return UnknownAdapter(text, param=fault.param)
    return BadAdapterRequest(text, param=fault.param or "lora_path", code=fault.code)


def _adapter_object(state: AdapterState, canary: str) -> dict[str, Any]:
    return {
        "id": state.adapter,
        "object": "adapter",
        "name": state.adapter,
        "digest": state.digest,
        "rank": state.rank,
        "bytes": state.size_bytes,
        "tier": state.tier,
        "pinned": state.pinned,
        "running": state.running,
        "state": state.status.upper(),
        "reason": state.reason or None,
        "canary": canary,
    }
