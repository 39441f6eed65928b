from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from gateway.config import GatewayConfig
from gateway.fleet.deciding import dispatcher_of
from loadtests import report
from loadtests.__main__ import app
from loadtests.contest import POLICIES, policy_of
from loadtests.faults import parse
from loadtests.prices import Prices
from loadtests.recipe import Recipe, generate
from loadtests.run import Run
from loadtests.run_page import as_outcomes, run_page
from loadtests.simulator import simulate
from loadtests.trace import Arrival
from shared.ids import AdapterId, ReplicaId, TenantId
from shared.messages import Tier

PRICES = Prices()
FLAT = {"disk_load_s": 0.15, "host_load_s": 0.004, "step_s": 0.02} | dict.fromkeys(
    ("row_s", "prompt_token_s", "adapter_s"), 0.0
)


def run(
    trace: tuple[Arrival, ...],
    replicas: int = 2,
    prices: Prices = PRICES,
    *,
    placement: bool = False,
) -> Run:
    policy = dispatcher_of(GatewayConfig(), placement=placement)
    return simulate(trace, policy=policy, replicas=replicas, prices=prices)


def one(at_s: float, adapter: str | None, output_tokens: int = 1) -> Arrival:
    name = None if adapter is None else AdapterId(adapter)
    return Arrival(at_s, TenantId("t"), name, 10, output_tokens)


recipes = st.builds(
    Recipe,
    seed=st.integers(0, 1 << 32),
    arrivals=st.integers(1, 150),
    rate_per_s=st.sampled_from([5, 50, 500]),
    adapters=st.integers(1, 40),
    base_share=st.sampled_from([0, 0.3, 1]),
    tenants=st.integers(1, 5),
)
prices = st.builds(
    Prices, slots=st.integers(1, 4), host_max=st.integers(4, 40), capacity=st.integers(1, 8)
)


@settings(max_examples=25)
@given(recipes, st.integers(1, 4), prices)
def test_every_arrival_ends_once_finished_or_refused(r: Recipe, replicas: int, p: Prices) -> None:
    trace = tuple(generate(r))
    done = run(trace, replicas, p)
    assert tuple(outcome.arrival for outcome in done.outcomes) == trace
    assert len(done.finished) + done.refused.total() == len(trace)
    assert sum(load.served for load in done.replicas.values()) == len(done.finished)
    for outcome in done.finished:
        assert (outcome.tier is None) == (outcome.arrival.adapter is None)
        assert 0 <= outcome.queue_s <= outcome.first_token_s <= outcome.total_s + 1e-9


@settings(max_examples=10)
@given(recipes, prices)
def test_the_same_trace_gives_the_same_run_bit_for_bit(r: Recipe, p: Prices) -> None:
    trace = tuple(generate(r))
    assert run(trace, 3, p) == run(trace, 3, p)


def test_a_first_request_pays_for_disk_and_slot_and_the_next_for_neither() -> None:
    p = Prices(**FLAT)
    cold, warm = run((one(1, "a"), one(2, "a")), 1, p).finished
    assert cold.tier is Tier.DISK
    assert cold.first_token_s == pytest.approx(0.174)
    assert warm.tier is Tier.GPU
    assert warm.first_token_s == pytest.approx(0.02)


def test_the_base_never_waits_for_an_adapter() -> None:
    adapter, base = run((one(1, "a"), one(1.001, None)), 1, Prices(**FLAT)).finished
    assert base.first_token_s == pytest.approx(0.02)
    assert base.tier is None
    assert adapter.first_token_s > 0.15


def test_a_prompt_is_computed_whole_though_others_were_as_long() -> None:
    prices = Prices(**FLAT | {"prompt_token_s": 0.001})
    trace = tuple(Arrival(10.0 * n, TenantId("t"), None, 300, 1) for n in range(4))
    for outcome in run(trace, 1, prices).finished:
        assert outcome.first_token_s == pytest.approx(0.32)


def test_a_run_reads_as_a_generator_would_have_seen_it() -> None:
    trace = tuple(generate(Recipe(arrivals=400, rate_per_s=60, adapters=20)))
    done = run(trace, prices=Prices(capacity=1, step_s=0.1))
    rows = as_outcomes(done)
    assert [row.number for row in rows] == list(range(400))
    assert sum(not row.failure for row in rows) == len(done.finished)
    assert done.refused.total() > 0
    told = report.figures(rows)
    assert told["ttft_ms"]["p99"] == pytest.approx(done.figures()["ttft_p99_ms"])
    assert told["completion_tokens"] == sum(o.arrival.output_tokens for o in done.finished)
    page = run_page(done, title="run", notes=["simulated"], skip=0.1)
    assert "Hits by tier" in page
    assert "refused" in page


def test_requests_that_wait_for_one_adapter_share_its_load() -> None:
    done = run(tuple(one(1 + i / 1000, "a") for i in range(5)), 1, Prices())
    assert done.loads == {Tier.HOST: 0, Tier.DISK: 1}
    assert {outcome.tier for outcome in done.finished} == {Tier.DISK}


def test_an_adapter_pushed_out_of_its_slot_comes_back_from_host_memory() -> None:
    done = run((one(1, "a"), one(2, "b"), one(3, "a")), 1, Prices(slots=1, host_max=2))
    assert [outcome.tier for outcome in done.finished] == [Tier.DISK, Tier.DISK, Tier.HOST]


def test_requests_of_one_adapter_go_to_one_replica_while_it_has_room() -> None:
    done = run(tuple(one(1 + i, "a") for i in range(20)), 4, Prices())
    assert len({outcome.replica for outcome in done.finished}) == 1
    assert Counter(outcome.tier for outcome in done.finished)[Tier.GPU] == 19


def test_a_flood_is_refused_at_the_tenants_bound_and_the_rest_is_served() -> None:
    flood = tuple(one(1 + i / 10_000, "a", output_tokens=100) for i in range(400))
    done = run(flood, 1, Prices(capacity=4))
    assert done.refused["queue_full"] > 0
    assert len(done.finished) + done.refused.total() == 400


def test_a_larger_host_tier_takes_disk_loads_off_the_path() -> None:
    trace = tuple(generate(Recipe(arrivals=700, rate_per_s=30, adapters=60, output_tokens_mean=8)))
    small, large = (run(trace, 1, Prices(slots=4, host_max=h)) for h in (8, 60))
    assert large.loads[Tier.DISK] <= 60 < small.loads[Tier.DISK]
    assert large.figures()["ttft_p99_ms"] < small.figures()["ttft_p99_ms"]


def test_a_stampede_on_a_cold_adapter_loads_it_once_an_owner() -> None:
    done = run(tuple(one(1 + i / 1000, "a", output_tokens=20) for i in range(60)), 6, Prices())
    served = [load for load in done.replicas.values() if load.served]
    assert done.loads[Tier.DISK] == len(served) < 6


@pytest.mark.parametrize("name", ["loraplex", "two-choices"])
def test_faults_cost_only_what_had_begun_and_every_arrival_still_ends_once(name: str) -> None:
    trace = tuple(generate(Recipe(arrivals=150, rate_per_s=40, adapters=12, output_tokens_mean=16)))
    faults = [parse(f) for f in ("slow:replica-2@0.5:3", "lost:replica-0@1", "added:replica-3@1.5")]
    faults.append(parse("drained:replica-1@2"))
    policy = policy_of(name, GatewayConfig())
    done = simulate(trace, policy=policy, replicas=3, prices=PRICES, faults=faults, warm_up_s=3)
    assert len(done.finished) + done.refused.total() + done.cut == len(trace)
    assert done.cut < 20
    assert done.replicas[ReplicaId("replica-3")].served > 0


def test_the_three_commands_work_together(tmp_path: Path) -> None:
    def loadtests(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    trace = str(tmp_path / "trace.jsonl")
    assert loadtests("trace", "generate", "--arrivals", "50", "-o", trace).exit_code == 0
    printed = loadtests("trace", "generate", "--arrivals", "50").stdout_bytes
    assert printed == Path(trace).read_bytes()
    assert json.loads(loadtests("trace", "describe", trace, "--json").stdout)["arrivals"] == 50
    told = json.loads(loadtests("simulate", trace, "--replicas", "2", "--json").stdout)
    assert [run["policy"] for run in told["runs"]] == list(POLICIES)
    for figures in told["runs"]:
        assert figures["arrived"] == figures["finished"] + sum(figures["refused"].values()) == 50
        assert sum(figures["adapter_found_in"].values()) == pytest.approx(1)
    printed = loadtests("simulate", trace, "--policy", "hash", "--fault", "lost:replica-0@1").stdout
    assert "TTFT p50" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "none"], "No such file"),
        (["trace", "describe", "none"], "No such file"),
        (["trace", "generate", "--rate", "0"], "rate_per_s"),
        (["simulate", "none", "--config", "none"], "none: "),
        (["simulate"], "--zipf"),
        (["simulate", "--zipf", "1", "--policy", "luck"], "luck"),
        (["simulate", "--zipf", "1", "--fault", "lost:replica-0"], "lost:REPLICA@SECONDS"),
    ],
)
def test_a_wrong_command_ends_with_two_and_says_why(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert says in done.stderr
