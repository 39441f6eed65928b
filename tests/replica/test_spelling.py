"""What a token is spelled with, in both kinds of vocabulary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from replica.spelling import Spelling


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "th", "Ġt"]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[("t", "h"), ("Ġ", "t")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|é|>", special=True)])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "日"]
    tokenizer = Tokenizer(models.Unigram([(p, -1.0) for p in pieces], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


BOTH = [(each, Spelling(each)) for each in (_byte_level(), _byte_fallback())]


@given(st.text(max_size=12))
def test_the_spellings_of_a_text_join_to_its_bytes(text: str) -> None:
    for tokenizer, spell in BOTH:
        tokens = tokenizer.encode(text.replace("▁", ""), add_special_tokens=False).ids
        assert b"".join(spell(token) for token in tokens) == text.replace("▁", "").encode()


def test_added_tokens_are_spelled_as_they_are_and_padding_is_nothing() -> None:
    tokenizer, spell = BOTH[0]
    assert spell(tokenizer.token_to_id("<|é|>")) == "<|é|>".encode()
    assert spell(10_000) == b""
