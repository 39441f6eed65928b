"""The small benchmark runs, and leaves the fleet at the load that it was given."""

from __future__ import annotations

from loadtests.bench_routing import Bench


def test_a_decision_is_timed_on_a_fleet_that_stays_at_its_load() -> None:
    bench = Bench(replicas=4, adapters=40, load=0.5, seed=1)
    before = bench.in_flight
    assert 0 < before <= 32
    told = bench.measure([bench.popular() for _ in range(50)])
    assert bench.in_flight == before
    assert told["place"]["count"] + told["refused"]["count"] == 50
    assert 0 < told["place"]["p50_us"] <= told["place"]["p99_us"]
    assert told["finish"]["count"] == told["place"]["count"]


def test_the_choice_alone_is_timed_and_sends_nothing() -> None:
    bench = Bench(replicas=4, adapters=40, load=0.5, seed=1)
    before = bench.in_flight
    told = bench.picks([bench.any() for _ in range(50)])
    assert told["count"] == 50
    assert 0 < told["p50_us"] <= told["p99_us"]
    assert bench.in_flight == before
