"""Fairness in virtual time: the bound at every sample, weights kept, a light tenant's wait."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.fair_setting import DEEP, ENGINES, LIGHT, NOBODY, flood
from loadtests.fair_simulation import RESERVE_SHARE, Simulation, Tenant
from loadtests.places import Engine
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
@given(
    tenants,
    st.integers(1, 2),
    st.sampled_from([1, 3, 8, 12]),
    st.sampled_from([0.0, RESERVE_SHARE, 0.5]),
    st.integers(),
)
def test_the_vtc_bound_holds_at_every_sample(
    rows: list[tuple[int, float, int, int]], replicas: int, capacity: int, share: float, seed: int
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
    found = Simulation(those, engine, Random(seed), reserve_share=share).run(5)
    assert found.widest_gap <= found.bound


@pytest.mark.parametrize("share", [RESERVE_SHARE, 0.3])
def test_weights_are_kept_within_five_percent_over_a_minute(share: float) -> None:
    those = [Tenant(name="three", depth=40, weight=3), Tenant(name="one", depth=40)]
    engine = Engine(replicas=1, capacity=16)
    found = Simulation(those, engine, Random(1), reserve_share=share).run(60)
    shares = found.tenants["three"].served / found.tenants["one"].served
    assert shares == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(
    ("name", "floods"), [("64 places", 1), ("128 places", 1), ("64 places", 4)]
)
def test_a_light_tenant_beside_deep_floods_waits_little_longer_than_alone(
    name: str, floods: int
) -> None:
    engine = ENGINES[name]
    assert flood(engine).depth - engine.replicas * engine.capacity == DEEP

    def p99_s(*others: Tenant) -> float:
        found = Simulation([LIGHT, *others], engine, Random(5)).run(120)
        return percentile(sorted(found.tenants["light"].first_tokens_s), 99)

    many = [replace(flood(engine), name=f"flood-{n}") for n in range(floods)]
    assert p99_s(*many) <= 1.5 * p99_s(NOBODY)


def test_the_reserve_costs_no_more_than_its_places_and_a_tenant_alone_nothing() -> None:
    engine = Engine(replicas=2, capacity=16)
    floods = [Tenant(name=name, depth=60) for name in "ab"]

    def served(tenants: list[Tenant], share: float) -> float:
        found = Simulation(tenants, engine, Random(2), reserve_share=share).run(60)
        return sum(seen.served for seen in found.tenants.values())

    assert served(floods, 0.125) >= (1 - 0.125 - 0.01) * served(floods, 0.0)
    assert served(floods[:1], 0.125) == served(floods[:1], 0.0)


@settings(max_examples=10)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers())
def test_nobody_starves_whatever_the_others_hold(weights: list[int], seed: int) -> None:
    """Floods of unlike costs and lengths, and one that comes now and then: all are served."""
    dice = Random(seed)
    those = [
        Tenant(
            name=str(n),
            depth=dice.randint(1, 40),
            weight=weight,
            prompt=(1, dice.choice([10, 4000])),
            output=(1, dice.choice([1, 64, 256])),
        )
        for n, weight in enumerate(weights)
    ]
    light = Tenant(name="light", depth=1, every_s=1.0, output=(4, 16))
    engine = Engine(replicas=2, capacity=8)
    found = Simulation([*those, light], engine, dice, reserve_share=0.25).run(60)
    assert all(seen.served > 0 for seen in found.tenants.values())
    assert max(found.tenants["light"].first_tokens_s) < 10
