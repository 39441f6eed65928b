"""Dice on the device: the sampler's law, for any mix of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Row
from replica.engine.sampler import draw

pytest.importorskip("triton")  # the package of kernels, though there is none in this
VOCAB = 3000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.just(9),
    temperature=st.floats(0.05, 3),
    top_p=st.sampled_from((1.0, 0.95, 0.5, 0.01)),
    top_k=st.sampled_from((0, 0, 1, 40, 2000)),
    min_p=st.sampled_from((0.0, 0.05, 0.5)),
    seed=st.none() | st.integers(0, 99),
)


def _row(seq: int, sampling: Sampling) -> Row:
    return Row(f"s{seq}", BASE_SLOT, 5, (1,), (0,), True, sampling, drawn=3)


@given(st.lists(SAMPLINGS, min_size=1, max_size=6), st.integers(0, 99), st.sampled_from((0.3, 4.0)))
def test_every_row_draws_what_the_sampler_draws(
    samplings: list[Sampling], seed: int, spread: float
) -> None:
    from replica.engine.cuda.dice import throw

    rows = [_row(i, sampling) for i, sampling in enumerate(samplings)]
    dice = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=dice) * spread
    expected = [drawn.token for drawn in draw(logits.clone(), rows)]
    assert throw(logits.to(DEVICE), rows).tolist() == expected


def test_a_row_that_is_not_finite_does_no_harm_to_others() -> None:
    from replica.engine.cuda.dice import throw

    rows = [_row(i, Sampling(max_tokens=9, top_p=0.9, seed=i)) for i in range(3)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = throw(logits, rows).tolist()
    logits[1, 7], logits[1, 9] = float("nan"), float("inf")
    ours = throw(logits, rows).tolist()
    assert (ours[0], ours[2]) == (expected[0], expected[2])
    assert 0 <= ours[1] < VOCAB


def test_only_draws_that_need_the_host_are_not_free() -> None:
    from replica.engine.cuda.dice import is_free

    assert is_free(_row(0, Sampling(max_tokens=9, top_p=0.5, top_k=4, min_p=0.1)))
    for wish in (
        {"logprobs": 0},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((3, 1.0),)},
        {"min_tokens": 4},
    ):
        assert not is_free(_row(0, Sampling(max_tokens=9, **wish)))
