"""The composition root: the one place where a replica's objects meet, start and stop.

Making a `Replica` reads the base and may take seconds; it raises BadBase or BadSettings. Then, in
one event loop: `await start()` gives the URL once the adapter folder was looked through and the
port listens; `await stop()` drains for `drain_s` at most and takes everything down.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from aiohttp import web

from replica.chat_template import ChatTemplate
from replica.config import ReplicaConfig
from replica.control import Control
from replica.core.adapter_cache import AdapterCache
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.edge import edge
from replica.engine.adapter_store import AdapterFolder, BadAdapter, HostAdapter
from replica.engine.choice import read_for, runner_on
from replica.engine.model_config import ModelConfig
from replica.engine.quantised import Quantization
from replica.engine.sections import require_fit
from replica.engine.threads import apart, lone
from replica.front import Front
from replica.grammar import Grammars
from replica.handlers import Handlers
from replica.intake import Intake
from replica.joining import Joining
from replica.journal import Journal
from replica.loop import Engine, EngineLoop
from replica.metrics import Metrics
from replica.origin import source_of
from replica.source import CopiedFrom, Source
from replica.text import Vocabulary
from replica.watch import StoreWatch
from shared.clock import monotonic
from shared.ids import AdapterId
from shared.logs import RequestLines
from shared.messages import AdapterState, Tier
from shared.settings import BadSettings
from shared.tasks import spawn, stop
from shared.tracing import tracer_of

_log = logging.getLogger(__name__)

_READERS: Final = 2
"""Threads that read adapters from disk."""
_DOWNLOADS: Final = 4
"""Threads that wait for adapters from an object store."""
_ANY_HOST: Final = ("0.0.0.0", "::")
"""To listen on; no address for others."""


class Replica:
    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self._model = model = ModelConfig.from_dir(config.base)
        _check(config, model)
        self.metrics = Metrics()
        self._readers = ThreadPoolExecutor(_READERS, "reader", initializer=lone)
        self._source = source_of(config, model)
        self._downloads = ThreadPoolExecutor(_DOWNLOADS, "download", initializer=lone)
        merged, self.engine = apart(self._parts)
        loop = EngineLoop(
            config=config,
            engine=self.engine,
            metrics=self.metrics,
            clock=monotonic,
            merged=None if merged is None else _state(merged),
        )
        self.front = Front(config=config, loop=loop)
        self.metrics.describe(
            lambda: self.front.report,
            lambda: set(self.front.waiting_adapters),
            page_tokens=config.page_tokens,
        )
        self._vocabulary = Vocabulary(config.base)
        self._template = ChatTemplate.from_dir(config.base)
        self._journal = Journal(
            config.log_requests,
            tracer_of(config.tracing, service="loraplex-replica", instance=config.name),
            RequestLines({"replica": config.name}),
        )
        self._watching: asyncio.Task[Any] | None = None
        self._server: web.AppRunner | None = None
        self._joining: Joining | None = None
        self._joined: asyncio.Task[None] | None = None

    def _parts(self) -> tuple[HostAdapter | None, Engine]:
        config, model, source = self.config, self._model, self._source
        merged = _merged(config, model)
        return merged, _engine(config, model, source, self._readers, self._downloads, merged)

    async def start(self) -> str:
        """Serve; returns the URL."""
        watch = StoreWatch(
            scan=self._source.scan,
            tell=self.front.scanned,
            readers=self._readers,
            every_s=self.config.rescan_s,
            clock=monotonic,
        )
        self.front.start()
        if not self.config.merged:
            await watch.refresh()
            self._watching = spawn(watch.run(), name="watch adapters")
        # A handler is cancelled when its client goes: that is what ends the client's sequences.
        self._server = web.AppRunner(
            self._web(watch), handler_cancellation=True, access_log=None, shutdown_timeout=5
        )
        await self._server.setup()
        await web.TCPSite(self._server, self.config.host, self.config.port, backlog=1024).start()
        host, port = self._server.addresses[0][:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _log.info("serving", extra={"url": url, "adapters": len(self.front.adapters)})
        self._join(url)
        return url

    def _join(self, url: str) -> None:
        config = self.config
        if config.join:
            self._joining = Joining(
                gateway=config.join,
                token=config.fleet_token,
                name=config.name,
                url=config.join_url or url,
            )
            self._joined = spawn(self._joining.run(), name="join the fleet")

    async def stop(self, *, hurry: asyncio.Event | None = None) -> None:
        """Refuse what is new, let run what runs until `drain_s` passed or `hurry` is set, end."""
        _log.info("draining", extra={"deadline_s": self.config.drain_s})
        self.front.drain(True)
        if self._joining is not None and self._joined is not None:
            await stop(self._joined)
            await self._joining.leave()
        quiet = spawn(self.front.quiet(), name="drain")
        waits = [quiet, *([] if hurry is None else [spawn(hurry.wait(), name="hurry")])]
        await asyncio.wait(waits, timeout=self.config.drain_s, return_when=asyncio.FIRST_COMPLETED)
        await stop(*waits)
        await self.front.close()
        if self._watching is not None:
            await stop(self._watching)
        if self._server is not None:
            await self._server.cleanup()
        await self._journal.close()
        for pool in (self._readers, self._downloads):
            pool.shutdown(wait=False, cancel_futures=True)
        self._source.close()

    def _web(self, watch: StoreWatch) -> web.Application:
        app = web.Application(middlewares=[edge], client_max_size=self.config.body_max_bytes)
        intake = Intake(
            vocabulary=self._vocabulary,
            vocab_size=self._model.vocab_size,
            template=self._template,
            grammars=Grammars(
                self.config.base,
                vocab_size=self._model.vocab_size,
                ends=self._model.eos_token_ids,
            ),
            length_max=lambda: self.front.report.max_model_len,
            choices_max=self.config.choices_max,
            clock=monotonic,
        )
        handlers = Handlers(
            config=self.config,
            front=self.front,
            vocabulary=self._vocabulary,
            intake=intake,
            journal=self._journal,
            look=watch.look,
        )
        control = Control(
            config=self.config,
            front=self.front,
            watch=watch,
            source=self._source,
            readers=self._readers,
            downloads=self._downloads,
            metrics=self.metrics,
        )
        app.add_routes([*handlers.routes(), *control.routes()])
        return app


def _merged(config: ReplicaConfig, model: ModelConfig) -> HostAdapter | None:
    """The adapter to fold into the base, in float32: what is rounded is the sum. No slot has to
    hold it, so its rank may be any."""
    if not config.merged:
        return None
    store = AdapterFolder(config.adapters, model.hidden_size, model, page_tokens=config.page_tokens)
    try:
        return store.read(AdapterId(config.merged))
    except BadAdapter as bad:
        raise BadSettings(f"merged: {config.merged}: {bad}") from bad


def _state(merged: HostAdapter) -> AdapterState:
    return AdapterState(
        merged.adapter,
        merged.digest,
        Tier.GPU,
        rank=merged.rank,
        size_bytes=merged.size_bytes,
        pinned=True,
    )


def _engine(
    config: ReplicaConfig,
    model: ModelConfig,
    source: Source,
    readers: ThreadPoolExecutor,
    downloads: ThreadPoolExecutor,
    merged: HostAdapter | None,
) -> Engine:
    pool = _pool(config, model)
    half = pool.pages if config.merged else pool.pages // 2  # the other half is for adapters
    limit, step = model.max_position_embeddings, config.max_step_tokens
    longest = config.max_model_len or pool.longest(limit, step, half)
    cache = AdapterCache(
        slots=config.max_loras,
        host_max=config.max_cpu_loras,
        host_bytes=config.host_bytes,
        pool=pool,
        pages_max=pool.pages - pool.most_for(longest, step),
    )
    scheduler = Scheduler(
        pool=pool,
        cache=cache,
        max_running=config.max_running,
        max_step_tokens=step,
        eos_ids=model.eos_token_ids,
        max_model_len=longest,
        mixed_step_ratio=config.mixed_step_ratio,
    )
    runner = runner_on(
        config.device,
        base_dir=config.base,
        dtype=config.dtype,
        slots=config.max_loras,
        max_rank=config.max_lora_rank,
        pages=config.pages,
        page_tokens=config.page_tokens,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_model_len=longest,
        threads=config.step_threads,
        merged=merged,
        quantization=Quantization(config.quantization),
    )
    return Engine(
        scheduler=scheduler,
        cache=cache,
        pool=pool,
        runner=runner,
        source=CopiedFrom(source, read_for(config.device, source.read)),
        readers=readers,
        downloads=downloads,
    )


def _pool(config: ReplicaConfig, model: ModelConfig) -> PagePool:
    return PagePool(pages=config.pages, page_tokens=config.page_tokens, window=model.window)


def _check(config: ReplicaConfig, model: ModelConfig) -> None:
    """What settings and base must agree on, before anything large is read."""
    faults = []
    if not config.adapters.is_dir():
        faults.append(f"adapters: {config.adapters} is no directory; create it, it may be empty")
    if config.max_cpu_loras is not None and config.max_cpu_loras < config.max_loras:
        faults.append("max_cpu_loras: must be at least max_loras, for slots are filled from there")
    if config.merged == config.base_name:
        faults.append("merged: the base has this name; give one of them another (served_name)")
    if config.join and not config.fleet_token:
        faults.append("join: needs fleet_token, the same as the gateways' fleet.token")
    if config.join and not config.join_url and config.host in _ANY_HOST:
        faults.append(f"join_url: say where gateways reach it, since it listens on {config.host}")
    if config.max_step_tokens < config.max_running:
        faults.append("max_step_tokens: must be at least max_running, one token a sequence")
    try:
        require_fit(model, config.page_tokens, config.max_lora_rank)
    except ValueError as fault:
        faults.append(str(fault))
    if config.max_model_len is not None:
        limit = _pool(config, model).longest(
            model.max_position_embeddings, config.max_step_tokens, config.pages
        )
        if config.max_model_len > limit:
            faults.append(f"max_model_len: base and pages allow {limit}")
    if faults:
        raise BadSettings("\n".join(faults))
