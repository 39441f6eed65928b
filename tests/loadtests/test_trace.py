from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.description import describe, fit_skew
from loadtests.popularity import Popularity, shares, zipf
from loadtests.recipe import Recipe, generate
from loadtests.tide import Tide
from loadtests.trace import Arrival, BadTrace, decode, encode, read, write
from shared.ids import AdapterId, TenantId

names = st.text(min_size=1, max_size=12)
arrivals = st.builds(
    Arrival,
    at_s=st.floats(0, 1e6, allow_nan=False).map(lambda at: round(at, 6)),
    tenant=names.map(TenantId),
    adapter=st.none() | names.map(AdapterId),
    prompt_tokens=st.integers(1, 1 << 20),
    output_tokens=st.integers(1, 1 << 20),
    session=st.none() | names,
)
traces = st.lists(arrivals, max_size=20).map(lambda a: tuple(sorted(a, key=lambda row: row.at_s)))
tides = st.builds(
    Tide,
    amplitude=st.floats(0, 0.95),
    period_s=st.floats(1, 1e5),
    flash_at_s=st.floats(0, 1e3),
    flash_s=st.floats(0, 1e3),
    flash_factor=st.floats(1, 100),
)
recipes = st.builds(
    Recipe,
    burstiness=st.sampled_from([1.0]) | st.floats(0.2, 10),
    tide=st.just(Tide()) | tides,
    drift_s=st.just(0.0) | st.floats(1, 1e3),
    session_requests=st.just(1.0) | st.floats(1, 10),
    seed=st.integers(0, 1 << 32),
    arrivals=st.integers(1, 200),
    rate_per_s=st.floats(0.1, 1e4),
    adapters=st.integers(1, 300),
    skew=st.floats(0, 2.5),
    base_share=st.floats(0, 1),
    tenants=st.integers(1, 20),
    prompt_sigma=st.floats(0, 2),
)


@given(traces)
def test_a_trace_written_and_read_is_the_same_trace(trace: tuple[Arrival, ...]) -> None:
    assert decode(encode(trace)) == trace


@given(recipes)
def test_the_same_recipe_gives_the_same_bytes_in_order_and_within_its_limits(r: Recipe) -> None:
    trace = tuple(generate(r))
    assert encode(generate(r)) == encode(trace)
    assert decode(encode(trace)) == trace
    assert len(trace) == r.arrivals
    assert all(1 <= a.prompt_tokens <= r.prompt_tokens_max for a in trace)
    assert all(1 <= a.output_tokens <= r.output_tokens_max for a in trace)


def test_a_seed_means_the_same_trace_for_ever() -> None:
    first = next(generate(Recipe(seed=7)))
    assert encode([first]) == (
        b'{"at_s":0.039131,"tenant":"tenant-1","adapter":"adapter-11",'
        b'"prompt_tokens":48,"output_tokens":4}\n'
    )


def test_another_seed_gives_another_trace() -> None:
    assert encode(generate(Recipe(seed=1))) != encode(generate(Recipe(seed=2)))


@settings(max_examples=25)
@given(st.integers(0, 1 << 32), st.integers(2, 60), st.floats(0, 2))
def test_ranks_follow_zipf_within_a_band(seed: int, adapters: int, skew: float) -> None:
    """The Dvoretzky-Kiefer-Wolfowitz band: passed by chance once in 10^9 traces."""
    n = 2000
    counts = Counter(
        a.adapter for a in generate(Recipe(seed=seed, arrivals=n, adapters=adapters, skew=skew))
    )
    width = len(str(adapters - 1))
    seen = accumulate(
        counts[AdapterId(f"adapter-{rank:0{width}d}")] / n for rank in range(adapters)
    )
    law = accumulate(zipf(adapters, skew))
    band = math.sqrt(math.log(2e9) / (2 * n))
    assert max(abs(a - b) for a, b in zip(seen, law, strict=True)) <= band


@given(st.integers(2, 400), st.floats(0, 3))
def test_the_fit_finds_the_skew_of_exact_counts(adapters: int, skew: float) -> None:
    counts = [round(p * 10**12) for p in zipf(adapters, skew)]
    assert fit_skew(counts) == pytest.approx(skew, abs=1e-3)


def test_a_description_says_what_the_recipe_said() -> None:
    recipe = Recipe(arrivals=20_000, rate_per_s=50, adapters=200, skew=1.1, base_share=0.2)
    told = describe(tuple(generate(recipe)))
    assert told.arrivals == 20_000
    assert told.rate_per_s == pytest.approx(50, rel=0.05)
    assert told.gap_cv == pytest.approx(1, abs=0.05)
    assert told.base_share == pytest.approx(0.2, abs=0.02)
    assert told.skew == pytest.approx(1.1, abs=0.05)
    assert told.prompt.mean == pytest.approx(128, rel=0.05)
    assert told.output.mean == pytest.approx(64, rel=0.05)
    assert told.tenants == 10
    assert told.prompt.sigma == pytest.approx(0.8, abs=0.05)
    assert told.dispersion["10 s"] == pytest.approx(1, abs=0.6)
    assert 20 < told.adapters_for_80_percent < 100


@given(tides, st.floats(0, 1e4), st.floats(0, 1e3))
def test_time_change_keeps_order_and_is_undone_by_its_inverse(
    tide: Tide, at_s: float, later_s: float
) -> None:
    assert tide.elapsed(at_s + later_s) >= tide.elapsed(at_s)
    assert tide.at(tide.elapsed(at_s)) == pytest.approx(at_s, rel=1e-9, abs=1e-6)
    assert 0 <= tide.crowd_share(at_s) < 1


@pytest.mark.parametrize("kind", list(Popularity))
@given(count=st.integers(1, 400))
def test_shares_fall_with_rank_and_sum_to_one(kind: Popularity, count: int) -> None:
    told = shares(kind, count)
    assert len(told) == count
    assert math.fsum(told) == pytest.approx(1)
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(told))


def test_functions_popularity_has_the_shape_that_was_measured() -> None:
    """Azure Functions: the first k of N take (k / N)^0.19 of the invocations."""
    told = list(accumulate(shares(Popularity.FUNCTIONS, 1000)))
    assert told[9] == pytest.approx((10 / 1000) ** 0.19)


@pytest.mark.parametrize("burstiness", [0.5, 3.0])
def test_gaps_vary_as_much_as_the_recipe_says(burstiness: float) -> None:
    recipe = Recipe(arrivals=20_000, burstiness=burstiness)
    told = describe(tuple(generate(recipe)))
    assert told.gap_cv == pytest.approx(burstiness, rel=0.1)
    assert told.rate_per_s == pytest.approx(recipe.rate_per_s, rel=0.1)


def test_a_flash_crowd_asks_for_its_own_adapter_while_it_lasts_and_not_after() -> None:
    tide = Tide(flash_at_s=100, flash_s=50, flash_factor=5)
    rows = tuple(generate(Recipe(arrivals=4000, tide=tide, adapters=50, crowd_adapter=49)))
    inside = [row for row in rows if 100 <= row.at_s < 150]
    assert len(inside) == pytest.approx(50 * 10 * 5, rel=0.1)
    wanted = sum(row.adapter == "adapter-49" for row in inside) / len(inside)
    assert wanted == pytest.approx(0.8, abs=0.05)
    outside = [row for row in rows if not 100 <= row.at_s < 150]
    assert sum(row.adapter == "adapter-49" for row in outside) / len(outside) < 0.05


def test_a_day_has_a_full_and_an_empty_half() -> None:
    tide = Tide(amplitude=0.8, period_s=100)
    rows = [row.at_s for row in generate(Recipe(arrivals=1000, tide=tide)) if row.at_s < 100]
    full = sum(at_s < 50 for at_s in rows)
    assert full / len(rows) == pytest.approx(0.5 + 0.8 / math.pi, abs=0.05)


def test_popularity_drifts_from_adapter_to_adapter() -> None:
    rows = tuple(generate(Recipe(arrivals=4000, adapters=20, skew=2.0, drift_s=100)))
    for moved in range(3):
        part = [row.adapter for row in rows if moved * 100 <= row.at_s < (moved + 1) * 100]
        assert Counter(part).most_common(1)[0][0] == f"adapter-{-moved % 20:02d}"


def test_a_session_keeps_its_adapter_and_its_prompts_grow() -> None:
    recipe = Recipe(arrivals=4000, session_requests=5, think_s=1, prompt_tokens_max=1 << 20)
    rows = tuple(generate(recipe))
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    sessions: dict[str | None, list[Arrival]] = {}
    for row in rows:
        sessions.setdefault(row.session, []).append(row)
    assert len(rows) / len(sessions) == pytest.approx(5, rel=0.2)
    for turns in sessions.values():
        assert len({(turn.adapter, turn.tenant) for turn in turns}) == 1
        assert all(a.prompt_tokens < b.prompt_tokens for a, b in pairwise(turns))


def test_every_adapter_has_one_tenant() -> None:
    owners = {
        (a.adapter, a.tenant) for a in generate(Recipe(arrivals=5000, adapters=40, tenants=7))
    }
    assert len(owners) == len({adapter for adapter, _ in owners})


def test_a_trace_of_one_request_to_the_base_can_be_described() -> None:
    told = describe((Arrival(0.0, TenantId("t"), None, 1, 1),))
    assert told.skew is None
    assert told.base_share == 1
    assert told.rate_per_s == 0


GOOD = b'{"at_s":1,"tenant":"t","adapter":"a","prompt_tokens":1,"output_tokens":1}\n'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected an object"),
        (GOOD.replace(b'"at_s":1', b'"at_s":-1'), "at_s: seconds"),
        (GOOD.replace(b'"at_s":1', b'"at_s":true'), "at_s: seconds"),
        (GOOD.replace(b'"at_s":1', b'"at_s":0.5'), "sort the rows"),
        (GOOD.replace(b'"t"', b'""'), "tenant: a name"),
        (GOOD.replace(b'"a"', b"7"), "adapter: a name"),
        (GOOD.replace(b'"prompt_tokens":1', b'"prompt_tokens":0'), "prompt_tokens: a whole number"),
        (GOOD.replace(b'"output_tokens":1', b'"output_tokens":1.5'), "output_tokens: a whole"),
        (GOOD.replace(b"tenant", b"user"), "unknown field user"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_what_was_wrong(
    line: bytes, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD + b"\n" + line)
    with pytest.raises(BadTrace, match=says) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_missing_file_and_an_empty_trace_say_so(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="No such file"):
        read(tmp_path / "none")
    write((), tmp_path / "empty")
    with pytest.raises(BadTrace, match="empty"):
        describe(read(tmp_path / "empty"))


@pytest.mark.parametrize(
    "wrong", [{"arrivals": 0}, {"rate_per_s": 0}, {"skew": -1}, {"base_share": 2}, {"tenants": 0}]
)
def test_a_recipe_that_cannot_be_followed_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(Recipe(), **wrong)
