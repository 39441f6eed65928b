from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.stats import jain, percentile, summarise

values = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(values, st.floats(0, 100))
def test_a_percentile_is_a_value_with_that_part_at_or_below_it(xs: list[float], q: float) -> None:
    xs.sort()
    at = percentile(xs, q)
    assert at in xs
    assert sum(x <= at for x in xs) >= len(xs) * q / 100
    assert sum(x < at for x in xs) <= len(xs) * q / 100


def test_percentiles_of_a_hundred_are_what_one_expects() -> None:
    xs = [float(x) for x in range(1, 101)]
    assert (percentile(xs, 50), percentile(xs, 99), percentile(xs, 100)) == (50, 99, 100)
    assert percentile(xs, 0) == 1


def test_a_percentile_of_nothing_is_no_number_and_a_wrong_one_is_refused() -> None:
    assert math.isnan(percentile([], 50))
    assert math.isnan(summarise([]).p99)
    with pytest.raises(ValueError, match=r"0\.\.100"):
        percentile([1.0], 101)


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=30), st.floats(0.01, 100))
def test_jain_lies_between_one_over_n_and_one_whatever_the_unit(xs: list[float], c: float) -> None:
    index = jain(xs)
    assert 1 / len(xs) - 1e-9 <= index <= 1 + 1e-9
    assert jain([x * c for x in xs]) == pytest.approx(index)


def test_jain_knows_equal_shares_and_a_monopoly() -> None:
    assert jain([3, 3, 3]) == pytest.approx(1)
    assert jain([5, 0, 0, 0]) == pytest.approx(0.25)
    assert jain([]) == jain([0, 0]) == 1
