"""The laws of a draw, and that neighbours are no part of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Row
from replica.engine.sampler import BROKEN, draw, uniform

VOCAB = 600  # more than the sampler sorts at first


def _row(seq: str = "s", drawn: int = 0, output: tuple[int, ...] = (), **sampling: Any) -> Row:
    return Row(
        seq=seq,
        slot=BASE_SLOT,
        start=0,
        tokens=(0,),
        pages=(0,),
        samples=True,
        sampling=Sampling(max_tokens=9, **sampling),
        drawn=drawn,
        output=output,
    )


def _logits(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def _tokens(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    return [drawn.token for drawn in draw(logits.clone(), rows)]


def test_greedy_is_the_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 3, 590]] = 2.0
    logits[1, 599] = 1.0
    assert _tokens(logits, [_row(temperature=0), _row(temperature=0)]) == [3, 599]


@given(st.integers(), st.integers(0, 10_000))
def test_the_dice_are_a_fraction_and_always_the_same(seed: int, drawn: int) -> None:
    assert 0 <= uniform(seed, drawn) < 1
    assert uniform(seed, drawn) == uniform(seed, drawn)
    assert uniform(seed, drawn) != uniform(seed, drawn + 1)


def test_the_dice_are_fair() -> None:
    numbers = sorted(uniform(1, i) for i in range(4000))
    gap = max(abs((i + 0.5) / 4000 - number) for i, number in enumerate(numbers))
    assert gap < 1.63 / math.sqrt(4000)  # Kolmogorov-Smirnov at 1 %


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 5},
    {"seed": 5, "temperature": 0.3, "top_p": 0.9},
    {"top_k": 4},
    {"min_p": 0.05, "seed": 1},
    {"top_k": 500, "top_p": 0.99, "seed": 2},
    {"temperature": 5.0, "top_p": 0.999, "seed": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": 4},
]


@given(st.permutations(range(len(KINDS))), st.integers(1, len(KINDS)))
def test_a_draw_does_not_depend_on_its_neighbours(order: list[int], count: int) -> None:
    logits = _logits(len(KINDS))
    rows = [_row(f"s{i}", i, (1, 2, 2), **kind) for i, kind in enumerate(KINDS)]
    alone = [_tokens(logits[i : i + 1], [rows[i]])[0] for i in range(len(KINDS))]
    chosen = order[:count]
    assert _tokens(logits[chosen], [rows[i] for i in chosen]) == [alone[i] for i in chosen]


def test_another_position_is_another_draw() -> None:
    logits = _logits(1, spread=0.5)
    assert len({_tokens(logits, [_row(drawn=i, seed=3)])[0] for i in range(50)}) > 30


def test_without_a_seed_the_sequence_is_the_seed() -> None:
    logits = _logits(1, spread=0.5)
    assert _tokens(logits, [_row("a")]) == _tokens(logits, [_row("a")])
    assert len({_tokens(logits, [_row(f"{i}")])[0] for i in range(50)}) > 30


def _allowed(logits: torch.Tensor, sampling: Sampling) -> dict[int, float]:
    """The distribution by the definition, one token at a time."""
    z = logits.double() / sampling.temperature
    p = z.softmax(-1)
    order = sorted(range(VOCAB), key=lambda i: -float(p[i]))
    order = [i for i in order if p[i] >= sampling.min_p * p[order[0]]]
    order = order[: sampling.top_k or VOCAB]
    mass = sum(float(p[i]) for i in order)
    kept, reached = [], 0.0
    for i in order:
        if kept and reached >= sampling.top_p * mass:
            break
        kept.append(i)
        reached += float(p[i])
    return {i: float(p[i]) / reached for i in kept}


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 400, "temperature": 2.0},
        {"top_p": 0.5},
        {"top_p": 1e-9},
        {"top_p": 0.999, "temperature": 4.0},
        {"min_p": 0.2},
        {"min_p": 0.01, "top_p": 0.95, "top_k": 300, "temperature": 2.0},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_is_left(sampling: dict[str, Any]) -> None:
    logits, times = _logits(1, seed=9), 3000
    expected = _allowed(logits[0], Sampling(max_tokens=1, **sampling))
    rows = [_row(drawn=i, seed=11, **sampling) for i in range(times)]
    seen = Counter(_tokens(logits.expand(times, -1), rows))
    assert set(seen) <= set(expected)
    likely = {token: p * times for token, p in expected.items() if p * times >= 5}
    rest = times - sum(likely.values())
    chi = sum((seen[token] - mean) ** 2 / mean for token, mean in likely.items())
    others = sum(count for token, count in seen.items() if token not in likely)
    chi += (others - rest) ** 2 / rest if rest >= 5 else 0
    freedom = max(1, len(likely) - (rest < 5))
    assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_penalties_count_what_was_drawn() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6], logits[0, 7] = 3.0, 2.5, 2.0
    kinds = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "temperature": 0}
    assert _tokens(logits, [_row(output=(5,), **kinds)]) == [6]  # 3 - 0.7 < 2.5
    assert _tokens(logits, [_row(output=(6, 6, 7), **kinds)]) == [5]
    assert _tokens(logits, [_row(output=(5, 5, 6, 6), **kinds)]) == [5]  # 2.0, 1.5, 2.0: lowest id
    assert _tokens(logits, [_row(output=(5,), temperature=0)]) == [5]


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_that_is_not_finite_is_broken_and_no_other(
    fault: float, kind: dict[str, Any]
) -> None:
    logits = _logits(3)
    rows = [_row(f"s{i}", output=(1,), **kind) for i in range(3)]
    whole = _tokens(logits, rows)
    logits[1, 17] = fault
    assert _tokens(logits, rows) == [whole[0], BROKEN, whole[2]]


def test_logprobs_are_those_of_the_model_itself() -> None:
    logits = _logits(2)
    expected = logits[0].log_softmax(-1)
    asked, silent = draw(
        logits.clone(),
        [_row(temperature=0.1, seed=1, logprobs=3, frequency_penalty=1.0, output=(4,)), _row()],
    )
    assert asked.logprob == pytest.approx(float(expected[asked.token]), abs=1e-5)
    best = expected.topk(3)
    assert [token for token, _ in asked.top] == best.indices.tolist()
    assert [value for _, value in asked.top] == pytest.approx(best.values.tolist())
    assert silent.logprob is None
    assert silent.top == ()


def test_no_rows_give_no_tokens() -> None:
    assert draw(torch.empty(0, VOCAB), []) == []
