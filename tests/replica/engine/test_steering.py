"""What requests add to logits: each by its definition, and for its own row alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Row
from replica.engine.sampler import BROKEN, draw
from replica.engine.steering import steer

VOCAB = 70


class Only:
    """A grammar that allows these tokens, whatever was drawn; none: it gives up."""

    def __init__(self, *tokens: int, bits: int = VOCAB) -> None:
        mask = sum(1 << token for token in tokens)
        self._mask = mask.to_bytes((bits + 31) // 32 * 4, "little") if tokens else None

    def allowed(self, drawn: tuple[int, ...]) -> bytes | None:
        return self._mask


def _row(
    output: tuple[int, ...] = (), prompt: tuple[int, ...] = (), grammar: Any = None, **sampling: Any
) -> Row:
    return Row(
        seq="s",
        slot=BASE_SLOT,
        start=0,
        tokens=(0,),
        pages=(0,),
        samples=True,
        sampling=Sampling(max_tokens=9, **sampling),
        drawn=len(output),
        output=output,
        prompt=prompt,
        grammar=grammar,
    )


def _logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _steered(row: Row, ends: frozenset[int] = frozenset()) -> torch.Tensor:
    logits = _logits(1)
    assert not steer(logits, [row], ends)
    return logits[0]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, output = (3, 4, 4, 60), (5, 3)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([[*prompt, *output]]), _logits(1)
    )[0]
    steered = _steered(_row(output, prompt, repetition_penalty=penalty))
    assert torch.allclose(steered, expected)


@given(
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=5),
    st.lists(st.integers(0, VOCAB - 1), max_size=6),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
)
def test_bias_and_penalties_add_up(
    bias: dict[int, float], output: list[int], presence: float, frequency: float
) -> None:
    row = _row(
        tuple(output),
        logit_bias=tuple(bias.items()),
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    expected = _logits(1)[0].double()
    for token in range(VOCAB):
        count = output.count(token)
        expected[token] += bias.get(token, 0) - frequency * count - presence * (count > 0)
    assert torch.allclose(_steered(row).double(), expected, atol=1e-4)


def test_end_tokens_wait_for_the_least_number_of_tokens() -> None:
    ends = frozenset({2, 69})
    for drawn in range(4):
        row = _row(tuple(range(drawn)), min_tokens=2, stop_token_ids=frozenset({7}))
        held = {t for t, z in enumerate(_steered(row, ends).tolist()) if z == -math.inf}
        assert held == ({2, 7, 69} if drawn < 2 else set())


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1), st.sampled_from([0, 1.0]), st.integers(0, 9))
def test_only_what_the_grammar_allows_is_drawn(
    tokens: set[int], temperature: float, seed: int
) -> None:
    for more in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}):
        row = _row(grammar=Only(*tokens), temperature=temperature, seed=seed, **more)
        [drawn] = draw(_logits(1, seed), [row])
        assert drawn.token in tokens


def test_tokens_beyond_the_mask_are_not_drawn() -> None:
    logits = torch.zeros(1, 200)
    logits[0, 150] = 50
    assert draw(logits, [_row(grammar=Only(5), temperature=0)])[0].token == 5


def test_a_grammar_that_gives_up_breaks_its_row_only() -> None:
    free = _row(temperature=0)
    lost = _row(temperature=0, grammar=Only())
    expected = draw(_logits(3), [free] * 3)
    assert [d.token for d in draw(_logits(3), [free, lost, free])] == [
        expected[0].token,
        BROKEN,
        expected[2].token,
    ]


def test_a_row_that_asks_for_nothing_is_not_touched() -> None:
    logits = _logits(2)
    steer(logits, [_row(), _row((1,), logit_bias=((4, 9.0),))], frozenset({2}))
    assert torch.equal(logits[0], _logits(2)[0])
    assert not torch.equal(logits[1], _logits(2)[1])


def test_logprobs_do_not_see_the_steering() -> None:
    row = _row(temperature=0, logprobs=1, logit_bias=((4, 100.0),), grammar=Only(4))
    expected = _logits(1)[0].log_softmax(-1)
    [drawn] = draw(_logits(1), [row])
    assert drawn.token == 4
    assert drawn.logprob == pytest.approx(float(expected[4]), abs=1e-5)
