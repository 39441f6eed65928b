"""What the gateway counts, for Prometheus: every series declared once, each child resolved once.

Label values are bounded: the first `LABELS_MAX` tenants and adapters to bring traffic have their
own series, the rest share `other`. A model name reaches a label only after it is known to exist
and the tenant may use it, so a client cannot make series.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from gateway.core.dispatcher import Decision, Dispatch, Kind
from shared.messages import Usage

LABELS_MAX: Final = 100
_OTHER: Final = "other"
_WAITS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_TOTALS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Names:
    """The first `most` names keep their own; later ones are `other`."""

    def __init__(self, most: int = LABELS_MAX) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) < self._most:
            self._known.add(name)
            return name
        return _OTHER


class _Series:
    """The children of one tenant and adapter, looked up once."""

    def __init__(self, metrics: Metrics, tenant: str, adapter: str) -> None:
        self._requests, self._who = metrics.requests, (tenant, adapter)
        self._outcomes: dict[str, Counter] = {}
        self.prompt = metrics.tokens.labels(tenant, adapter, "prompt")
        self.cached = metrics.tokens.labels(tenant, adapter, "cached")
        self.completion = metrics.tokens.labels(tenant, adapter, "completion")

    def outcome(self, outcome: str) -> Counter:
        if outcome not in self._outcomes:
            self._outcomes[outcome] = self._requests.labels(*self._who, outcome)
        return self._outcomes[outcome]


class Metrics:
    """One set a process; `registry` is its own, so that two can live in one test."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenants, self._adapters = Names(), Names()
        self._series: dict[tuple[str, str], _Series] = {}
        self.requests = self._counter(
            "requests", "Requests by how they ended.", "tenant", "adapter", "outcome"
        )
        self.tokens = self._counter("tokens", "Model tokens.", "tenant", "adapter", "kind")
        self.rejects = self._counter("rejects", "Requests refused, by reason.", "reason")
        self.retries = self._counter("retries", "Requests sent on to another replica.", "reason")
        placements = self._counter("placements", "Requests placed, by kind.", "kind")
        self._placed = {kind: placements.labels(kind) for kind in Kind}
        self.reports = self._counter("reports", "Replica reports, by result.", "replica", "result")
        self._queue = self._histogram("queue", "Wait for a replica.", _WAITS_S)
        self._first_token = self._histogram("first_token", "Arrival to first token.", _WAITS_S)
        self._total = self._histogram("request", "Arrival to the end of the reply.", _TOTALS_S)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when Prometheus asks."""
        gauge = Gauge(f"loraplex_gateway_{name}", text, registry=self.registry)
        gauge.set_function(read)

    def decision(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            self._placed[decision.placement.kind].inc()

    def ended(
        self,
        tenant: str,
        adapter: str,
        outcome: str,
        *,
        usage: Usage,
        queue_s: float,
        first_token_s: float | None,
        total_s: float,
    ) -> None:
        series = self._of(tenant, adapter)
        series.outcome(outcome).inc()
        series.prompt.inc(usage.prompt_tokens)
        series.cached.inc(usage.cached_tokens)
        series.completion.inc(usage.completion_tokens)
        self._queue.observe(queue_s)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
        self._total.observe(total_s)

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def _of(self, tenant: str, adapter: str) -> _Series:
        key = (self._tenants.of(tenant), self._adapters.of(adapter))
        if key not in self._series:
            self._series[key] = _Series(self, *key)
        return self._series[key]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"loraplex_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"loraplex_gateway_{name}_seconds", text, buckets=buckets, registry=self.registry
        )
