from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.description import describe, fit_skew
from loadtests.recipe import Recipe, generate, zipf
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
)
traces = st.lists(arrivals, max_size=20).map(lambda a: tuple(sorted(a, key=lambda row: row.at_s)))
recipes = st.builds(
    Recipe,
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
    assert told.prompt_tokens_mean == pytest.approx(128, rel=0.05)
    assert told.output_tokens_mean == pytest.approx(64, rel=0.05)
    assert told.tenants == 10
    assert 20 < told.adapters_for_80_percent < 100


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
