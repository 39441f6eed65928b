"""Draft: what a replica says of itself, put together from its parts. Runs on the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, replace

from replica.config import ReplicaConfig
from replica.core.adapter_cache import AdapterCache
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.rates import Rates
from shared.ids import ReplicaId
from shared.messages import AdapterState, ReplicaReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    config: ReplicaConfig
    boot: str
    scheduler: Scheduler
    pool: PagePool
    cache: AdapterCache
    rates: Rates
    merged: AdapterState | None  # the adapter that the base has become, if it has

    def report(self, *, draining: bool) -> ReplicaReport:
        """The replica as it is; `seq` is for `Reports` to set."""
        config, rates = self.config, self.rates
        return ReplicaReport(
            replica=ReplicaId(config.name),
            boot=self.boot,
            seq=0,
            base=config.base_name,
            slots=config.max_loras,
            capacity=config.max_running,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            pages_total=self.pool.pages,
            pages_free=self.pool.available,
            max_model_len=self.scheduler.max_model_len,
            heartbeat_s=config.heartbeat_s,
            draining=draining,
            merged=None if self.merged is None else self.merged.adapter,
            adapters=self._adapters(),
            pages_cached=self.pool.cached,
            pages_adapters=self.cache.pages_used,
            max_rank=config.max_lora_rank,
            host_max=config.max_cpu_loras or 0,
            host_bytes=config.host_bytes or 0,
            host_bytes_used=self.cache.host_bytes,
            copy_bytes_per_s=rates.copy.bytes_per_s,
            read_bytes_per_s=rates.read.bytes_per_s,
            fetch_bytes_per_s=rates.fetch.bytes_per_s,
        )

    def _adapters(self) -> tuple[AdapterState, ...]:
        if self.merged is None:
            return self.cache.states()
        return (replace(self.merged, running=self.scheduler.running),)
