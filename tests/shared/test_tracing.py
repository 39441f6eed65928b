"""Who is sampled, and that a collector that is slow, full or gone costs nobody anything."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from collector import Collector, collecting
from local_fleet import eventually

from shared import span_export
from shared.clock import ManualClock
from shared.span_export import Span
from shared.trace_context import NO_TRACE, TraceHeaders
from shared.tracing import Tracer, TracingConfig, tracer_of

SAMPLED = TraceHeaders("00-" + "a" * 32 + "-" + "b" * 16 + "-01", "k=v")
UNSAMPLED = TraceHeaders("00-" + "a" * 32 + "-" + "b" * 16 + "-00", "k=v")
STAGE = Span("stage", 1, 0, 1.0, 2.0)


@contextmanager
def tracer(endpoint: str = "http://127.0.0.1:9", **settings: Any) -> Iterator[Tracer]:
    clock = settings.pop("clock", ManualClock(5))
    config = TracingConfig(endpoint=endpoint, **{"timeout_s": 0.2, **settings})
    one = Tracer(config, service="test", clock=clock, dice=random.Random(1))
    try:
        yield one
    finally:
        one.close()


def test_without_a_collector_there_is_no_tracer() -> None:
    assert tracer_of(TracingConfig(), service="test") is None


def test_about_the_ratio_of_traces_that_begin_here_is_sampled() -> None:
    with tracer(ratio=0.25, per_s_max=1e9) as one:
        many = [one.begin(NO_TRACE) for _ in range(4000)]
    assert sum(ours.sampled for ours, _ in many) == pytest.approx(1000, abs=100)
    assert len({ours.trace_id for ours, _ in many}) == len(many)
    assert {parent for _, parent in many} == {None}


@pytest.mark.parametrize("ratio", [0, 1])
def test_where_a_parent_has_decided_the_ratio_has_no_say(ratio: float) -> None:
    with tracer(ratio=ratio) as one:
        ours, parent = one.begin(SAMPLED)
        assert parent is not None
        assert ours.sampled
        assert (ours.trace_id, ours.state) == (parent.trace_id, "k=v")
        assert ours.span_id != parent.span_id
        passed, parent = one.begin(UNSAMPLED)
        assert passed == parent  # nothing of ours is between


def test_clients_that_want_everything_sampled_get_so_many_a_second() -> None:
    clock = ManualClock(5)
    with tracer(per_s_max=10, clock=clock) as one:
        assert sum(one.begin(SAMPLED)[0].sampled for _ in range(50)) == 10
        clock.advance(1)
        ours, parent = one.begin(SAMPLED)
        assert ours.sampled
        over = [one.begin(SAMPLED)[0] for _ in range(50)][-1]
        assert not over.sampled  # and says so to whoever is asked next
        assert parent is not None
        assert (over.trace_id, over.span_id) == (parent.trace_id, parent.span_id)


def test_the_queue_is_bounded_and_what_is_over_it_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_export, "_CLOSE_S", 0.3)
    with tracer(queue_max=5) as one:
        context, _ = one.begin(SAMPLED)
        began = time.perf_counter()
        for _ in range(1000):
            one.end(context, [STAGE])
        assert time.perf_counter() - began < 0.5
        assert one.export.lost >= 900


def test_a_collector_that_is_away_loses_spans_and_gets_those_that_come_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def at(collector: Collector) -> int:
        return len(collector.spans)

    caplog.set_level("INFO", "shared.span_export")
    with collecting() as collector, tracer(collector.url) as one:
        context, _ = one.begin(SAMPLED)
        collector.status = 400
        one.end(context, [STAGE])
        eventually(lambda: one.export.not_taken == 1)
        collector.status = 200
        one.end(context, [STAGE, STAGE])
        eventually(lambda: at(collector) == 2)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["the collector does not take spans", "the collector takes spans again"]
    assert one.export.lost == 0


def test_a_span_says_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector, tracer(collector.url + "/v1/traces") as one:
        context, parent = one.begin(SAMPLED)
        assert parent is not None
        about: dict[str, span_export.Value] = {"text": "a", "count": 3, "share": 0.5, "is": True}
        whole = Span("whole", context.span_id, parent.span_id, 10, 12.5, about, "server", "lost")
        one.end(context, [whole._replace(remote=True)])
        [seen] = collector.trace("a" * 32, services=1)
    assert (seen.span, seen.parent) == (f"{context.span_id:016x}", "b" * 16)
    assert seen.ended - seen.began == 2_500_000_000
    assert (seen.about, seen.error, seen.state) == (about, True, "k=v")
    assert seen.service == "test"
