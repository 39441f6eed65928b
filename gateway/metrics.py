"""What the gateway counts, for Prometheus.

Label values are bounded: the first `LABELS_MAX` tenants and adapters to bring traffic have their
own series, the rest share `other`. A model name reaches a label only after it is known to exist
and the tenant may use it, so a client cannot make series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from gateway.core.dispatcher import Decision, Dispatch, Kind, Standing, Verdict
from shared.messages import Tier, Usage

LABELS_MAX: Final = 100
_OTHER: Final = "other"
_WAITS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_GAPS_S: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0)
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
    """What one tenant and adapter came to."""

    __slots__ = ("cached", "completion", "outcomes", "prompt")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.prompt = self.cached = self.completion = 0


class _Times:
    """A histogram of seconds."""

    __slots__ = ("_bounds", "_counts", "_name", "_sum", "_text")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = f"loraplex_gateway_{name}_seconds", text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self) -> HistogramMetricFamily:
        ends = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(self._counts), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class Metrics:
    """One set a process; `registry` is its own, so that two can live in one test.

    What every request counts is kept in plain numbers of this thread, and told to Prometheus when
    it asks: its own counters lock at each step, 10 µs a request in all.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenants, self._adapters = Names(), Names()
        self._series: dict[tuple[str, str], _Series] = {}
        self._placed = dict.fromkeys(Kind, 0)
        self._gauges: dict[str, Gauge] = {}
        self._counted: list[tuple[str, str, Callable[[], float]]] = []
        self._queue = _Times("queue", "Wait for a replica.", _WAITS_S)
        self._first_token = _Times("first_token", "Arrival to first token.", _WAITS_S)
        self._gap = _Times("token_gap", "Mean time between a reply's tokens.", _GAPS_S)
        self._total = _Times("request", "Arrival to the end of the reply.", _TOTALS_S)
        self.registry.register(self)
        self.rejects = self._counter("rejects", "Requests refused, by reason.", "reason")
        self.retries = self._counter("retries", "Requests sent on to another replica.", "reason")
        self.retries_denied = self._counter(
            "retries_denied", "Retries that the budget had no room for."
        )
        self._over_quota = self._counter(
            "over_quota", "Requests over a limit; in shadow they went on.", "limit", "mode"
        )
        self._ejections = self._counter(
            "ejections", "Replicas taken out for misbehaving.", "replica", "reason"
        )
        self._readmissions = self._counter(
            "readmissions", "Replicas taken in again after an ejection.", "replica"
        )
        self._orders = self._counter(
            "orders", "Orders to replicas: what to bring to a tier, and to keep.", "tier", "result"
        )
        self._ordered = self._counter(
            "ordered_adapters", "Adapters that such orders named.", "tier", "result"
        )
        self.lookups = self._counter(
            "lookups", "Look-ups of services, by what they found.", "srv", "result"
        )
        self.members = self._counter(
            "members", "Replicas that joined, moved and left the fleet.", "change"
        )
        self.reports = self._counter("reports", "Replica reports, by result.", "replica", "result")

    def over_quota(self, limit: str, shadow: bool) -> None:
        self._over_quota.labels(limit, "shadow" if shadow else "enforced").inc()

    def watch(self, name: str, text: str, read: Callable[[], float], **labels: str) -> None:
        """A gauge that is read when Prometheus asks; of several `labels` once for each."""
        if (gauge := self._gauges.get(name)) is None:
            named = f"loraplex_gateway_{name}"
            gauge = self._gauges[name] = Gauge(named, text, [*labels], registry=self.registry)
        (gauge.labels(**labels) if labels else gauge).set_function(read)

    def count(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A counter that is kept elsewhere, read when Prometheus asks."""
        self._counted.append((name, text, read))

    def ordered(self, tier: Tier, result: str, adapters: int) -> None:
        self._orders.labels(tier.value, result).inc()
        self._ordered.labels(tier.value, result).inc(adapters)

    def decision(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            self._placed[decision.placement.kind] += 1

    def verdict(self, verdict: Verdict) -> None:
        if verdict.standing is Standing.EJECTED:
            self._ejections.labels(verdict.replica, verdict.why).inc()
        elif verdict.standing is Standing.READMITTED:
            self._readmissions.labels(verdict.replica).inc()

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
        series.outcomes[outcome] = series.outcomes.get(outcome, 0) + 1
        series.prompt += usage.prompt_tokens
        series.cached += usage.cached_tokens
        series.completion += usage.completion_tokens
        self._queue.observe(queue_s)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)
            if usage.completion_tokens > 1:
                self._gap.observe((total_s - first_token_s) / (usage.completion_tokens - 1))
        self._total.observe(total_s)

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Prometheus asks for what is kept in plain numbers."""
        requests = _family(
            "requests", "Requests by how they ended.", "tenant", "adapter", "outcome"
        )
        tokens = _family("tokens", "Model tokens.", "tenant", "adapter", "kind")
        for who, series in self._series.items():
            for outcome, count in series.outcomes.items():
                requests.add_metric([*who, outcome], count)
            for kind in ("prompt", "cached", "completion"):
                tokens.add_metric([*who, kind], getattr(series, kind))
        placements = _family("placements", "Requests placed, by kind.", "kind")
        for kind, count in self._placed.items():
            placements.add_metric([kind], count)
        yield from (requests, tokens, placements)
        for name, text, read in self._counted:
            family = _family(name, text)
            family.add_metric([], read())
            yield family
        yield from (times.family() for times in self._times())

    def _times(self) -> tuple[_Times, ...]:
        return self._queue, self._first_token, self._gap, self._total

    def _of(self, tenant: str, adapter: str) -> _Series:
        key = (self._tenants.of(tenant), self._adapters.of(adapter))
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = _Series()
        return series

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"loraplex_gateway_{name}", text, labels, registry=self.registry)


def _family(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"loraplex_gateway_{name}", text, labels=labels)
