"""Laws of a plan's arithmetic: nothing runs here."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loadtests.cache_law import distinct, hit_share
from loadtests.calibration import fitted, measured
from loadtests.demand import Demand, Sizes, busiest, of_recipe, of_trace
from loadtests.lesson import SETTINGS, Lesson, hits
from loadtests.machine import Machine
from loadtests.neighbours import part_of
from loadtests.planner import propose
from loadtests.popularity import zipf
from loadtests.proposal import Advice, Level, Proposal, Wish
from loadtests.recipe import Recipe, generate
from loadtests.sizing import batch_tokens, load, sized
from shared.ids import AdapterId, TenantId

RANK_BYTES = 5_242_880.0
RESULTS = Path(__file__).parents[2] / "loadtests" / "results"
RANKS = Sizes(RANK_BYTES, ((8, 60.0), (16, 36.0), (256, 4.0)))


def demand(
    rate: float = 40.0, adapters: int = 500, *, skew: float = 1.1, sizes: Sizes | None = None
) -> Demand:
    recipe = Recipe(
        rate_per_s=rate,
        adapters=adapters,
        skew=skew,
        prompt_tokens_mean=256,
        output_tokens_mean=128,
    )
    return of_recipe(recipe, sizes or Sizes(RANK_BYTES))


def by_topic(proposal: Proposal, topic: str) -> Advice:
    return next(one for one in proposal.advice if one.topic == topic)


demands = st.builds(
    demand,
    rate=st.floats(0.01, 2000),
    adapters=st.integers(1, 60),
    skew=st.floats(0, 2),
    sizes=st.sampled_from([Sizes(RANK_BYTES), RANKS]),
)
machines = st.builds(
    Machine,
    gpu_bytes=st.floats(20e9, 150e9),
    host_bytes=st.floats(1e8, 1e12),
    capacity=st.integers(1, 256),
    padded=st.integers(0, 1),
)


@given(demands, st.floats(1, 20), machines)
def test_more_requests_never_take_a_replica_away(
    asked: Demand, more: float, machine: Machine
) -> None:
    few, many = (
        sized("shared", one, machine, Wish())
        for one in (asked, replace(asked, rate_per_s=more * asked.rate_per_s))
    )
    assert many.replicas >= few.replicas
    assert many.replicas * Wish().utilisation >= load(many.demand, machine) - 1e-6


@given(demands, machines)
def test_slots_grow_only_over_a_host_tier_that_holds_the_working_set(
    asked: Demand, machine: Machine
) -> None:
    for pool in propose(asked, machine, Wish()).pools:
        if pool.shared and pool.slots > 8 * math.ceil(
            distinct(pool.demand.shares, machine.capacity) / 8
        ):
            assert pool.host_covers


@given(demands, machines)
def test_base_batch_and_slots_fit_in_gpu_memory_or_the_plan_warns(
    asked: Demand, machine: Machine
) -> None:
    proposal = propose(asked, machine, Wish())
    for pool in proposal.pools:
        if pool.shared and pool.slots_max >= pool.slots:
            left = machine.free_bytes(batch_tokens(pool.demand, machine))
            assert pool.slots * pool.slot_bytes <= left * (1 + 1e-9)
        elif pool.shared:
            levels = [one.level for one in proposal.advice if one.topic == "slots"]
            assert Level.WARNING in levels


@given(demands, machines, st.integers(1, 4))
def test_host_memory_is_never_overdrawn_and_a_pool_that_covers_has_a_place_for_everyone(
    asked: Demand, machine: Machine, copies: int
) -> None:
    wish = Wish(copies=copies)
    for pool in propose(asked, machine, wish).pools:
        if not pool.shared:
            continue
        one_adapter = pool.demand.mean_bytes
        assert pool.host_bytes <= max(machine.host_bytes, one_adapter) * (1 + 1e-9)
        adapters = len(pool.demand.adapters)
        if pool.host_covers:
            assert pool.replicas * pool.host_slots * wish.host_share >= adapters


@given(demands, machines)
def test_no_request_is_lost_between_the_pools(asked: Demand, machine: Machine) -> None:
    proposal = propose(asked, machine, Wish())
    rates = math.fsum(pool.demand.rate_per_s for pool in proposal.pools)
    assert rates == pytest.approx(asked.rate_per_s)
    for pool in proposal.pools:
        shares = math.fsum(pool.demand.shares) + pool.demand.base_share
        assert not pool.demand.adapters or shares == pytest.approx(1)


@given(demands, machines)
def test_every_line_has_its_reason_and_host_memory_comes_before_slots(
    asked: Demand, machine: Machine
) -> None:
    proposal = propose(asked, machine, Wish())
    topics = [one.topic for one in proposal.advice]
    assert topics[0] == "host"
    assert max(i for i, t in enumerate(topics) if t == "host") < topics.index("slots")
    for one in proposal.advice:
        assert one.say
        assert one.because
        assert one.otherwise or one.level is Level.OK
    if any(not pool.host_covers for pool in proposal.pools):
        assert Level.WARNING in [one.level for one in proposal.advice if one.topic == "host"]


def test_five_hundred_adapters_get_host_places_for_all_of_them() -> None:
    proposal = propose(demand(), Machine(), Wish())
    [pool] = proposal.pools
    assert pool.host_covers
    assert pool.replicas * pool.host_slots >= 500
    assert by_topic(proposal, "host").level is Level.DO


def test_a_short_host_tier_is_said_first_and_no_slot_is_added() -> None:
    slow = Machine(copy_bytes_per_s=1e9)  # so slow that slots are wanted
    enough = propose(demand(), slow, Wish()).pools[0]
    short = propose(demand(), replace(slow, host_bytes=4e9), Wish())
    assert enough.slots > short.pools[0].slots
    first = short.advice[0]
    assert (first.topic, first.level) == ("host", Level.WARNING)
    assert "host memory first" in first.say
    assert "before host memory holds the working set" in by_topic(short, "slots").because


def test_an_adapter_that_fills_a_replica_gets_one_with_its_weights_merged() -> None:
    few = propose(demand(rate=40), Machine(), Wish())
    many = propose(demand(rate=400), Machine(), Wish())
    assert not [pool for pool in few.pools if pool.merged]
    merged = next(pool for pool in many.pools if pool.merged)
    assert merged.merged == "adapter-000"
    assert by_topic(many, "merge").level is Level.DO
    settled = propose(demand(rate=400), Machine(), Wish(replicas=6))
    assert len(settled.pools) == 1
    assert settled.pools[0].replicas == 6
    assert by_topic(settled, "merge").level is Level.WARNING


def test_high_ranks_get_a_pool_where_they_fill_it_or_crowd_the_others_out() -> None:
    busy = propose(demand(rate=900, skew=0.0, sizes=RANKS), Machine(), Wish())
    high = next(pool for pool in busy.pools if pool.name == "high-rank")
    assert high.max_rank == 256
    assert busy.pools[0].max_rank == 16
    quiet = propose(demand(rate=20, skew=0.0, sizes=RANKS), Machine(), Wish())
    assert len(quiet.pools) == 1
    assert "no pool of their own" in by_topic(quiet, "ranks").say
    padded = propose(
        demand(rate=20, skew=0.0, sizes=RANKS), Machine(padded=1, capacity=128), Wish()
    )
    assert [pool.name for pool in padded.pools] == ["shared", "high-rank"]


def test_quotas_leave_headroom_over_the_fullest_minute_and_weights_follow_use() -> None:
    proposal = propose(demand(), Machine(), Wish(headroom=3))
    for quota, tenant in zip(proposal.quotas, demand().tenants, strict=True):
        assert quota.requests_per_min >= 3 * tenant.peak_requests_per_min
        assert quota.tokens_per_min >= 3 * tenant.peak_tokens_per_min
        assert quota.concurrency >= 1
    weights = [quota.weight for quota in proposal.quotas]
    assert weights == sorted(weights, reverse=True)
    assert weights[-1] == 1


# -- what a plan starts from


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=40), st.integers(1, 60))
def test_a_larger_cache_finds_more_and_a_batch_names_no_more_than_there_are(
    shares: list[float], places: int
) -> None:
    assert hit_share(shares, places) <= hit_share(shares, places + 1) + 1e-9
    assert distinct(shares, places) <= min(len(shares), places * math.fsum(shares)) + 1e-9


def test_the_law_of_a_cache_is_that_of_the_lesson() -> None:
    lesson = Lesson()
    for gpu, _ in SETTINGS:
        exact = hits(lesson, gpu_slots=gpu, host_slots=1).gpu_hit
        assert hit_share(zipf(lesson.adapters, lesson.skew), gpu) == pytest.approx(exact, abs=0.006)


@given(st.integers(1, 400), st.lists(st.floats(0.1, 9), min_size=1, max_size=4))
def test_a_mix_of_ranks_is_dealt_out_as_it_says(count: int, weights: list[float]) -> None:
    mix = tuple((8 << n, weight) for n, weight in enumerate(weights))
    dealt = Counter(Sizes(1.0, mix).of(n, "")[0] for n in range(count))
    for rank, weight in mix:
        assert abs(dealt[rank] - count * weight / sum(weights)) <= 6
    assert Sizes(1.0, mix, {"a": (5, 7.0)}).of(0, "a") == (5, 7.0)


def test_the_busiest_stretch_is_the_shortest_of_so_many_arrivals() -> None:
    rows = tuple(generate(Recipe(arrivals=300, burstiness=4)))
    part = busiest(rows, 50)
    assert len(part) == 50
    assert part[0].at_s == 0
    span = min(rows[at + 49].at_s - rows[at].at_s for at in range(251))
    assert part[-1].at_s == pytest.approx(span)
    assert busiest(rows, 1000)[-1].at_s == pytest.approx(rows[-1].at_s - rows[0].at_s)


def test_a_trace_says_what_its_recipe_does() -> None:
    recipe = Recipe(arrivals=8000, adapters=40, base_share=0.2, rate_per_s=20)
    rows = tuple(generate(recipe))
    seen, known = of_trace(rows, RANKS), of_recipe(recipe, RANKS)
    assert known.rate_per_s <= seen.rate_per_s <= 1.2 * known.rate_per_s  # in the fullest minute
    assert seen.base_share == pytest.approx(0.2, abs=0.02)
    assert math.fsum(seen.shares) + seen.base_share == pytest.approx(1)
    assert math.fsum(known.shares) + known.base_share == pytest.approx(1)
    assert seen.adapters[0].name == known.adapters[0].name
    assert seen.adapters[0].share == pytest.approx(known.adapters[0].share, rel=0.1)
    ranks = {adapter.name: adapter.rank for adapter in known.adapters}
    assert all(ranks[adapter.name] == adapter.rank for adapter in seen.adapters)
    first, other = seen.tenants[0], known.tenants[0]
    assert first.name == other.name
    assert first.requests_per_min == pytest.approx(other.requests_per_min, rel=0.1)


def test_an_adapter_that_comes_at_its_own_time_is_found() -> None:
    rows = list(generate(Recipe(arrivals=800, rate_per_s=1)))
    late = [
        replace(rows[0], at_s=500 + n, adapter=AdapterId("evening"), tenant=TenantId("t"))
        for n in range(30)
    ]
    trace = tuple(sorted((*rows, *late), key=lambda row: row.at_s))
    seen = of_trace(trace, RANKS)
    assert [visit.adapter for visit in seen.visits] == ["evening"]
    proposal = propose(seen, Machine(), Wish())
    assert "placement.schedule" in by_topic(proposal, "prefetch").say


def test_pools_share_out_the_rows_of_a_trace() -> None:
    asked = demand(rate=400)
    proposal = propose(asked, Machine(), Wish())
    assert len(proposal.pools) > 1
    rows = tuple(generate(Recipe(arrivals=3000, adapters=500, rate_per_s=400)))
    parts = [part_of(rows, pool, asked) for pool in proposal.pools]
    assert sum(map(len, parts)) == pytest.approx(len(rows), abs=len(proposal.pools))
    for pool, part in zip(proposal.pools, parts, strict=True):
        assert all((row.adapter is None) == bool(pool.merged) for row in part)


def test_the_defaults_of_a_machine_are_the_fit_of_what_was_measured() -> None:
    fit = measured(RESULTS / "h200-engine.json")
    for name, value in fit.items():
        assert getattr(Machine(), name) == pytest.approx(value, rel=0.15), name


@given(st.floats(1e-4, 1), st.floats(0, 1e-3), st.floats(0, 1e-3), st.floats(1e-7, 1e-4))
def test_a_fit_finds_the_times_that_made_the_cells(
    step_s: float, row_s: float, adapter_s: float, prompt_token_s: float
) -> None:
    cells = [
        {
            "mix": mix,
            "concurrency": rows,
            "prompt": 100,
            "step_ms_p50": 1e3 * (step_s + row_s * rows + adapter_s * adapters),
            "first_token_ms_max": 1e3
            * (step_s + row_s * rows + adapter_s * adapters + prompt_token_s * 100 * rows),
        }
        for rows in (1, 8, 64)
        for mix, adapters in (("none", 0), ("one", 1), ("distinct", min(rows, 64)))
    ]
    found = fitted(cells)
    assert found["step_s"] == pytest.approx(step_s, rel=1e-6)
    assert found["row_s"] == pytest.approx(row_s, abs=1e-8)
    assert found["adapter_s"] == pytest.approx(adapter_s, abs=1e-8)
    assert found["prompt_token_s"] == pytest.approx(prompt_token_s, rel=1e-5, abs=1e-10)
    assume(len(cells) > 3)
    with pytest.raises(ValueError, match="do not vary"):
        fitted([cell for cell in cells if cell["concurrency"] == 8])


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON"), ("[]", "neither"), ('{"machine": {"x": 1}}', "neither"), (None, "No such")],
)
def test_a_file_of_measurements_that_is_none_is_named(
    tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "m.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=says):
        measured(path)
    path.write_text('{"machine": {"step_s": 0.5, "note": "x"}}')
    assert measured(path) == {"step_s": 0.5}
