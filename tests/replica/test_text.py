"""Growing text: whole characters only, nothing lost, stop strings cut where they begin."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from replica.stop_strings import StopStrings
from replica.text import Detokenizer, GrowingText, Vocabulary

SAMPLE = "The cat sat on the mat. 日本語のテキスト 🤗🎉👩‍👩‍👧 naïve café\n\n  indented"


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 3, trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2 has it: pieces with a leading mark for a space, single bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "a", "b", "▁cat", "日", "é"]
    model = models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return tokenizer


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Vocabulary:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = _byte_level() if request.param == "byte_level" else _byte_fallback()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Vocabulary(folder)


def _plain(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return vocabulary.decode([token for token in tokens if token not in vocabulary.special])


@given(text=st.text(alphabet=st.sampled_from(SAMPLE), max_size=40))
def test_pieces_join_to_the_text_and_are_whole_characters(
    vocabulary: Vocabulary, text: str
) -> None:
    tokens = list(vocabulary.encode(text, special=False))
    growing = Detokenizer(vocabulary)
    pieces = [growing.feed(token) for token in tokens]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == _plain(vocabulary, tokens)


@given(data=st.data())
def test_any_tokens_at_all_never_raise_and_a_valid_text_is_never_changed(
    vocabulary: Vocabulary, data: st.DataObject
) -> None:
    token = st.integers(0, vocabulary.size - 1)
    tokens = data.draw(st.lists(token, max_size=60))
    growing = Detokenizer(vocabulary)
    text = "".join(growing.feed(token) for token in tokens)
    whole = _plain(vocabulary, tokens)
    if "\ufffd" not in whole:
        assert text == whole
    text.encode()  # a text that could not be sent would raise


def test_garbage_does_not_hold_back_what_follows_it(vocabulary: Vocabulary) -> None:
    broken = vocabulary.encode("🤗", special=False)[-1]  # the last byte of an emoji, alone
    growing = Detokenizer(vocabulary)
    for _ in range(100):
        growing.feed(broken)
    said = "".join(growing.feed(token) for token in vocabulary.encode(" the cat", special=False))
    assert said.endswith("the cat")


def test_special_tokens_leave_no_text_unless_asked_for(vocabulary: Vocabulary) -> None:
    special = min(vocabulary.special)
    assert Detokenizer(vocabulary).feed(special) == ""
    assert Detokenizer(vocabulary, skip_special=False).feed(special) != ""


def test_a_special_token_does_not_eat_the_space_after_it(vocabulary: Vocabulary) -> None:
    the_cat = vocabulary.encode("the cat", special=False)
    growing = Detokenizer(vocabulary)
    first = "".join(growing.feed(token) for token in the_cat)
    growing.feed(min(vocabulary.special))
    again = "".join(growing.feed(token) for token in vocabulary.encode("the cat", special=False))
    assert first + again == _plain(vocabulary, [*the_cat, *the_cat])


def _through(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    cut = StopStrings(stops)
    sent = "".join(cut.feed(piece) for piece in pieces)
    return sent + cut.flush(), cut.stopped


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    data=st.data(),
)
def test_a_stop_string_cuts_the_same_text_wherever_pieces_end(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    sent, stopped = _through(stops, pieces)
    assert (sent, stopped) == _through(stops, list(text))
    if stopped:
        assert text.startswith(sent)
        assert any(text.startswith(stop, len(sent)) for stop in stops)
        assert not any(stop in sent for stop in stops)
    else:
        assert sent == text
        assert not any(stop in text for stop in stops)


def test_what_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    cut = StopStrings(["\n\nUser:"])
    assert cut.feed("Hello\n") == "Hello"
    assert cut.feed("\nUs") == ""
    assert cut.feed("ual") == "\n\nUsual"
    assert cut.feed(" text\n\nUser: hi") == " text"
    assert cut.stopped
    assert cut.feed("more") == ""


def test_a_stop_string_across_tokens_ends_the_text_of_a_sequence(vocabulary: Vocabulary) -> None:
    growing = GrowingText(vocabulary, stops=["cat sat"])
    sent = ""
    for token in vocabulary.encode("the cat sat on", special=False):
        sent += growing.feed(token)
        if growing.stopped:
            break
    assert growing.stopped
    assert sent + growing.flush() == "the "
