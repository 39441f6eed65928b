from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.cost import BYTES_PER_TOKEN, Cost, estimate_tokens


@given(st.integers(0, 10**9))
def test_an_estimate_rounds_up(prompt_bytes: int) -> None:
    tokens = estimate_tokens(prompt_bytes)
    assert prompt_bytes <= tokens * BYTES_PER_TOKEN < prompt_bytes + BYTES_PER_TOKEN


def test_an_output_token_costs_what_its_weight_says() -> None:
    assert Cost(input_weight=1, output_weight=2).of(input_tokens=10, output_tokens=5) == 20


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        Cost(input_weight=weight, output_weight=1)
