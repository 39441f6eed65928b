"""What a replica counts, in Prometheus form.

The `vllm:` series are those that autoscalers and inference gateways already read; of the Gateway
API Inference Extension's model server protocol (docs/proposals/003) all are here, by the names and
labels of vLLM. Gauges are not stored: a scrape reads the newest report, so no series outlives what
it describes, and each has exactly one. Counters move on the engine thread; they lock inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from replica.core.sequence import Finish
from replica.core.step import Row, Step
from shared.clock import Clock, wall
from shared.messages import AdapterStatus, ReplicaReport, Tier

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, unread

_NAMESPACE: Final = "loraplex_replica"
_LOAD_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STEP_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Metrics:
    """One registry a replica, so that several live in one test process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._loads = self._histogram(
            "adapter_load_seconds", "Time to bring an adapter into a slot", _LOAD_S, "tier"
        )
        self._waits = self._histogram(
            "adapter_wait_seconds",
            "Arrival of a sequence until its adapter is in a slot, by the tier it was in",
            _LOAD_S,
            "tier",
        )
        self._prefetches = self._counter(
            "adapter_prefetches", "Adapters brought to a tier before a sequence had them", "tier"
        )
        self._load_failures = self._counter(
            "adapter_load_failures", "Adapters that could not be brought into a slot"
        )
        self._evictions = self._counter("adapter_evictions", "Adapters that left a tier", "tier")
        self._steps = self._histogram("step_seconds", "Time of one forward pass", _STEP_S)
        self._tokens = self._counter("tokens", "Model tokens computed, by kind of work", "kind")
        self._cached = self._counter(
            "cached_prompt_tokens", "Prompt tokens whose keys were found in cached pages"
        )
        self._sequences = self._counter("sequences", "Sequences that ended, by how", "finish")
        self._generated = Counter(
            "vllm:generation_tokens", "Tokens that sequences were given", registry=self.registry
        )
        for tier in (Tier.HOST, Tier.DISK):
            self._loads.labels(tier.value)
        for tier in (Tier.GPU, Tier.HOST):
            self._evictions.labels(tier.value)
            self._prefetches.labels(tier.value)
        for tier in Tier:
            self._waits.labels(tier.value)
        for kind in ("prefill", "decode"):
            self._tokens.labels(kind)
        for finish in Finish:
            self._sequences.labels(finish.value)

    def describe(
        self,
        report: Callable[[], ReplicaReport],
        waiting: Callable[[], set[str]],
        *,
        page_tokens: int,
    ) -> None:
        """Where scrapes find the state of the moment."""
        self.registry.register(_State(report, waiting, page_tokens, wall))

    def loaded(self, tier: Tier, seconds: float) -> None:
        self._loads.labels(tier.value).observe(seconds)

    def waited(self, tier: Tier, seconds: float) -> None:
        self._waits.labels(tier.value).observe(seconds)

    def prefetched(self, tier: Tier) -> None:
        self._prefetches.labels(tier.value).inc()

    def load_failed(self) -> None:
        self._load_failures.inc()

    def evicted(self, tier: Tier) -> None:
        self._evictions.labels(tier.value).inc()

    def step(self, step: Step, seconds: float) -> None:
        decode = sum(1 for row in step.rows if _decodes(row))
        self._steps.observe(seconds)
        self._tokens.labels("decode").inc(decode)
        self._tokens.labels("prefill").inc(step.total_tokens - decode)

    def cached(self, tokens: int) -> None:
        self._cached.inc(tokens)

    def ended(self, finish: Finish, tokens: int) -> None:
        """A sequence that was given so many tokens: what the bill is reconciled with."""
        self._generated.inc(tokens)
        self._sequences.labels(finish.value).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=_NAMESPACE, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            name, text, labels, namespace=_NAMESPACE, registry=self.registry, buckets=buckets
        )


def _decodes(row: Row) -> bool:
    """One token of a sequence that has drawn before; a recomputed one counts as prefill."""
    return row.samples and row.drawn > 0 and len(row.tokens) == 1


class _State(Collector):
    def __init__(
        self,
        report: Callable[[], ReplicaReport],
        waiting: Callable[[], set[str]],
        page_tokens: int,
        clock: Clock,
    ) -> None:
        self._report = report
        self._waiting = waiting
        self._page_tokens = page_tokens
        self._clock = clock

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._report()
        pages = _pages(now)
        used = pages["kv"] / max(1, now.pages_total - now.pages_adapters)
        yield _vllm("num_requests_running", "Sequences that run", now.base, now.running)
        yield _vllm("num_requests_waiting", "Sequences that wait", now.base, now.waiting)
        yield _vllm(
            "kv_cache_usage_perc", "Pages in use of those adapters leave, 1 is all", now.base, used
        )
        cache = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Pages of the pool and tokens of keys in one; adapters take from the same pages",
            labels=["block_size", "num_gpu_blocks"],
        )
        cache.add_metric([str(self._page_tokens), str(now.pages_total)], 1)
        yield cache
        by_use = GaugeMetricFamily(
            f"{_NAMESPACE}_pages", "Pages of the pool, by what holds them", labels=["use"]
        )
        for use, count in pages.items():
            by_use.add_metric([use], count)
        yield by_use
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that run and wait; the value is when it was so",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running = sorted(state.adapter for state in now.adapters if state.running)
        waiting = sorted(self._waiting())
        info.add_metric([str(now.slots), ",".join(running), ",".join(waiting)], self._clock())
        yield info
        yield _ours("slots", "Adapters that fit in one forward pass", now.slots)
        in_slot = [state for state in now.adapters if state.tier is Tier.GPU]
        yield _ours("slots_used", "Slots that hold an adapter", len(in_slot))
        yield _ours("host_bytes", "Bytes of host memory for adapters, 0 is any", now.host_bytes)
        yield _ours("host_bytes_used", "Bytes of adapters in host memory", now.host_bytes_used)
        yield _ours("adapters_pinned", "Adapters that may not leave", _count_pinned(now))
        known = GaugeMetricFamily(
            f"{_NAMESPACE}_adapters", "Adapters in the store, by state", labels=["status"]
        )
        for status in AdapterStatus:
            count = sum(1 for state in now.adapters if state.status is status)
            known.add_metric([status.value], count)
        yield known


def _pages(report: ReplicaReport) -> dict[str, int]:
    """`kv`: of sequences; `cached`: keys that nobody reads now."""
    return {
        "kv": report.pages_total - report.pages_free - report.pages_adapters,
        "cached": report.pages_cached,
        "adapter": report.pages_adapters,
        "free": report.pages_free - report.pages_cached,
    }


def _count_pinned(report: ReplicaReport) -> int:
    return sum(1 for state in report.adapters if state.pinned)


def _vllm(name: str, text: str, model: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _ours(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_NAMESPACE}_{name}", text, value=value)
