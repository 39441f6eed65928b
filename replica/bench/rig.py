"""Rig: one engine of random weights, put together as a replica does, and adapters for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch

from replica.bench.loops import Loop, Measured
from replica.bench.random_base import random_adapter, random_base
from replica.bench.workload import Work
from replica.core.adapter_cache import AdapterCache, Evict, Load
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.core.sequence import Sequence as Request
from replica.engine.cuda.mixed import SIZES
from replica.engine.cuda.runner import GRAPH_SIZES, CudaRunner
from replica.engine.flight import Arrival
from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.quantised import Quantization
from shared.ids import AdapterId
from shared.messages import Tier

MODEL_LEN: Final = 4096
MIXED_STEP_RATIO: Final = 3.0
"""As a replica's settings have it."""
_FILES: Final = 8  # of different weights a rank; the names beyond share them, in pages of their own


class Rig:
    def __init__(
        self,
        config: ModelConfig,
        *,
        device: str,
        quantization: Quantization,
        ranks: Sequence[int],
        slots: int,
        cache_tokens: int,
        max_running: int,
        max_step_tokens: int,
        page_tokens: int = 16,
        files: int = _FILES,
    ) -> None:
        """`ranks` of the adapters there are; `slots` of them may be on the GPU. bfloat16 there,
        float32 on a CPU."""
        self.config, self._ranks = config, tuple(ranks)
        on = torch.device(device)
        dtype = torch.float32 if on.type == "cpu" else torch.bfloat16
        self.hosts = self._make_adapters(dtype, files, pinned=on.type == "cuda")
        self._pages = -(-cache_tokens // page_tokens)
        self._page_tokens, self._slots = page_tokens, slots
        self._max_running, self._max_step_tokens = max_running, max_step_tokens
        began = time.perf_counter()
        weights = random_base(config, device=on, dtype=dtype, quantization=quantization)
        self.weights_s = time.perf_counter() - began
        began = time.perf_counter()
        self.runner = CudaRunner(
            weights=weights,
            slots=slots,
            max_rank=max(ranks, default=1),
            pages=self._pages,
            page_tokens=page_tokens,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_model_len=MODEL_LEN,
            graph_sizes=[size for size in GRAPH_SIZES if size < max_running + 8],
            mixed_sizes=SIZES if on.type == "cuda" else (),
        )
        self.runner_s = time.perf_counter() - began
        self.start()

    def start(self, *, pages_max: int | None = None) -> None:
        """Empty slots and pages; adapters are in host memory, and may have `pages_max` together."""
        for slot in range(self._slots):
            self.runner.clear(slot)
        self.pool = PagePool(
            pages=self._pages, page_tokens=self._page_tokens, window=self.config.window
        )
        self.cache = AdapterCache(
            slots=max(1, self._slots),
            host_max=max(1, len(self._ranks)),
            pool=self.pool,
            pages_max=pages_max,
        )
        for host in self.hosts.values():
            wanted = self.runner.pages_of(host)
            self.cache.offer(host.adapter, host.digest, host.rank, host.size_bytes, wanted)
            self.cache.read(host.adapter, host.digest)
        self.scheduler = Scheduler(
            pool=self.pool,
            cache=self.cache,
            max_running=self._max_running,
            max_step_tokens=self._max_step_tokens,
            eos_ids=self.config.eos_token_ids,
            max_model_len=MODEL_LEN,
            mixed_step_ratio=MIXED_STEP_RATIO,
        )
        self._loading: list[tuple[Arrival | None, Load, float]] = []
        self.loads_s: list[float] = []
        """From the wish to the arrival, of each load since `start`."""

    def run(self, work: Work, seed: int, *, arrivals_s: Sequence[float] | None = None) -> Measured:
        """A closed loop, or an open one where it is said when requests come."""
        return Loop(
            scheduler=self.scheduler,
            runner=self.runner,
            mover=self,
            is_resident=self._is_resident,
            requests=work.requests_for(self.config, len(self._ranks), seed),
            concurrency=work.concurrency,
            arrivals_s=arrivals_s,
        ).run()

    def begin(self) -> None:
        """What the cache wants, as `replica.tiers` does it."""
        now = time.perf_counter()
        for command in self.cache.poll(now):
            match command:
                case Load(adapter, digest, slot, tier):
                    pages = self.cache.pages_in(slot)
                    arrival = self.runner.load(slot, self.hosts[adapter], pages)
                    if tier is Tier.DISK:
                        self.cache.read(adapter, digest)
                    self._loading.append((arrival, command, now))
                case Evict(_, slot):
                    self.runner.clear(slot)

    def arriving(self) -> bool:
        now = time.perf_counter()
        for loading in list(self._loading):
            arrival, load, begun = loading
            if arrival is None or arrival.query():
                self._loading.remove(loading)
                self.loads_s.append(now - begun)
                self.cache.loaded(load.adapter, load.digest, load.slot)
        self.begin()
        return bool(self._loading)

    def _is_resident(self, request: Request) -> bool:
        return request.adapter is None or self.cache.slot_of(request.adapter) is not None

    def _make_adapters(
        self, dtype: torch.dtype, files: int, *, pinned: bool
    ) -> dict[AdapterId, HostAdapter]:
        made: dict[tuple[int, int], HostAdapter] = {}
        hosts = {}
        for i, rank in enumerate(self._ranks):
            name, key = AdapterId(f"a{i}"), (rank, i % files)
            if key not in made:
                made[key] = random_adapter(
                    name, self.config, rank, dtype=dtype, seed=i, pinned=pinned
                )
            hosts[name] = HostAdapter(name, name, rank, made[key].flat, made[key].ranks)
        return hosts
