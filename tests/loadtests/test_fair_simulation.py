"""Fairness in virtual time: the bound at every sample, weights kept, a light tenant's wait."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.fair_simulation import Engine, Simulation, Tenant
from loadtests.fairness import DEEP, ENGINE, LIGHT, flood
from loadtests.stats import percentile

tenants = st.lists(
    st.tuples(
        st.integers(1, 12),
        st.sampled_from([1.0, 2.0, 5.0]),
        st.sampled_from([100, 4000]),
        st.sampled_from([1, 32, 1024]),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=15)
@given(tenants, st.integers(1, 2), st.integers(1, 8), st.integers())
def test_the_vtc_bound_holds_at_every_sample(
    rows: list[tuple[int, float, int, int]], replicas: int, capacity: int, seed: int
) -> None:
    """Tenants that are backlogged all the time: each has more outstanding than there are places."""
    places = replicas * capacity
    those = [
        Tenant(
            name=str(n), depth=places + depth, weight=weight, prompt=(1, most), output=(1, output)
        )
        for n, (depth, weight, most, output) in enumerate(rows)
    ]
    engine = Engine(replicas=replicas, capacity=capacity)
    found = Simulation(those, engine, Random(seed)).run(5)
    assert found.widest_gap <= found.bound


@pytest.mark.parametrize("seed", range(2))
def test_weights_are_kept_within_five_percent_over_a_minute(seed: int) -> None:
    those = [Tenant(name="three", depth=40, weight=3), Tenant(name="one", depth=40)]
    found = Simulation(those, Engine(replicas=1, capacity=16), Random(seed)).run(60)
    shares = found.tenants["three"].served / found.tenants["one"].served
    assert shares == pytest.approx(3, rel=0.05)


def test_a_light_tenant_beside_a_deep_flood_waits_little_longer_than_alone() -> None:
    def p99_s(*others: Tenant) -> float:
        found = Simulation([LIGHT, *others], ENGINE, Random(5)).run(150)
        return percentile(sorted(found.tenants["light"].first_tokens_s), 99)

    assert flood(ENGINE).depth - ENGINE.replicas * ENGINE.capacity == DEEP
    assert p99_s(flood(ENGINE)) <= 1.5 * p99_s(Tenant(name="none", depth=0))
