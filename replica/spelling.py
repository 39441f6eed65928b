"""Spelling: the bytes that one token stands for, alone.

What a token reads as depends on its neighbours; what it is spelled with does not. Byte-level
vocabularies (GPT-2, Llama 3, Qwen) write each byte as one printable character. SentencePiece's
(Llama 2, Mistral) write a space as a low line and bytes without a piece of their own as `<0xE6>`.
Added tokens are spelled as they are, in both.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from tokenizers import Tokenizer

_SPACE: Final = "\u2581"
_FALLBACK: Final = re.compile(r"<0x([0-9A-F]{2})>")


class Spelling:
    __slots__ = ("_added", "_byte_level", "_fallback", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        decoder = tokenizer.decoder
        steps = _types(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._byte_level = "ByteLevel" in steps
        self._fallback = "ByteFallback" in steps

    def __call__(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""  # a row of the weights beyond the vocabulary
        if token in self._added:
            return str(piece).encode()
        if self._byte_level:
            return b"".join(_BYTES.get(letter) or letter.encode() for letter in piece)
        if self._fallback and (byte := _FALLBACK.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return str(piece).replace(_SPACE, " ").encode()


def _types(decoder: Any) -> set[str]:
    """A decoder's type, and those of the steps it consists of."""
    return {decoder["type"], *(name for d in decoder.get("decoders", ()) for name in _types(d))}


def _byte_letters() -> dict[str, bytes]:
    """GPT-2's alphabet: bytes that print stand for themselves, others for U+0100 and on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): bytes([byte]) for byte in plain}
    return letters | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTES: Final = _byte_letters()
