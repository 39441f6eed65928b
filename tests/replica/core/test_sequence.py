from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.core.sequence import Finish, Sampling, Sequence

SAMPLING = Sampling(max_tokens=4)


@given(st.lists(st.integers(), max_size=8), st.lists(st.integers(), max_size=8), st.data())
def test_a_stretch_is_a_slice_of_all_tokens(
    prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    seq = Sequence("s", None, tuple(prompt), SAMPLING, 0.0, output=output)
    start = data.draw(st.integers(0, len(seq)))
    end = data.draw(st.integers(start, len(seq)))
    assert seq.between(start, end) == seq.tokens[start:end]
    assert len(seq) == len(seq.tokens)


@pytest.mark.parametrize(
    ("seq", "advice"),
    [
        (Sequence("s", None, (), SAMPLING, 0.0), "send at least one"),
        (Sequence("s", None, (1,), replace(SAMPLING, max_tokens=0), 0.0), "ask for at least 1"),
        (Sequence("s", None, (1,) * 10, SAMPLING, 0.0), "shorten the prompt to at most 9 tokens"),
        (Sequence("s", None, (1,), SAMPLING, 0.0, output=[3]), "make a new one"),
        (Sequence("s", None, (1,), SAMPLING, 0.0, finish=Finish.STOP), "make a new one"),
    ],
)
def test_a_sequence_that_can_never_run_is_told_what_to_do(seq: Sequence, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        seq.require_fit(10)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    Sequence("s", None, (1,) * 9, SAMPLING, 0.0).require_fit(10)


def test_only_penalties_look_back() -> None:
    assert not SAMPLING.penalises
    assert replace(SAMPLING, presence_penalty=0.5).penalises
    assert replace(SAMPLING, frequency_penalty=-0.5).penalises
