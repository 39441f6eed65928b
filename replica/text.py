"""Between text and tokens: the base's tokenizer, text as it grows, and where it must stop.

Laws of a growing text, whatever the tokens:
- pieces are never taken back and never end inside a character (no half UTF-8 is ever sent);
- while the whole decodes to valid text, the joined pieces are a prefix of it, and all of it once
  its last character is complete;
- a stop string ends the text before its first character, wherever token borders fall, and the
  text that leaves is the same however the tokens cut it.

`tokenizers.decoders.DecodeStream` does not keep the second: on bytes that are not UTF-8 it raises
("Invalid prefix encountered") or holds back everything that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from replica.spelling import Spelling
from replica.stop_strings import StopStrings

_BROKEN: Final = "\ufffd"
_TAIL: Final = 3
"""An unfinished character has at most three bytes, each of which may decode to one mark."""
_PATIENCE: Final = 16
"""Tokens that may pass without a settled character. What comes then is not UTF-8: it is given
out as it reads, and decoding stays linear. (Byte fallback marks a whole run of bytes while its
last character is unfinished, so the marks at the end may be more than `_TAIL` in good text.)"""


class Vocabulary:
    """The base's tokenizer. Thread-safe: encoding a long prompt may run off the event loop."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: Final = frozenset(at for at, token in added.items() if token.special)
        self.spell: Final = Spelling(self._tokenizer)
        self.size: Final[int] = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Tokens of `text`; `special` adds what the tokenizer puts around a bare prompt."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special ones included."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found


class Detokenizer:
    """Text of one sequence, token by token.

    It decodes a window that begins at the previous settled token, since what a token reads as
    depends on the one before it (leading spaces, merged bytes), and gives out what is new.
    """

    __slots__ = ("_read", "_shown", "_skip", "_vocabulary", "_window")

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special
        self._window: list[int] = []
        self._read = 0  # tokens of the window that were settled when it last slid
        self._shown = 0  # characters of the window's text already given out

    def feed(self, token: int) -> str:
        if self._skip and token in self._vocabulary.special:
            return ""
        self._window.append(token)
        text = self._vocabulary.decode(self._window)
        held = len(text) - len(text.rstrip(_BROKEN))
        if impatient := len(self._window) - self._read > _PATIENCE:
            held = min(held, _TAIL)
        stable = len(text) - held
        piece = text[self._shown : stable]
        self._shown = max(self._shown, stable)
        if not held or impatient:
            self._slide(held)
        return piece

    def _slide(self, held: int) -> None:
        del self._window[: self._read]
        self._read = len(self._window)
        self._shown = len(self._vocabulary.decode(self._window)) - held


class GrowingText:
    """Tokens in, text that may be sent out; `stopped` once a stop string was completed.

    The text of the first `min_tokens` tokens is no part of any stop string. `length` is how many
    characters the tokens so far have settled, those held back or cut off included.
    """

    __slots__ = ("_detokenizer", "_stops", "_unstopped", "length")

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        stops: Sequence[str],
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special=skip_special)
        self._stops = StopStrings(stops)
        self._unstopped = min_tokens
        self.length = 0

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    def feed(self, token: int) -> str:
        piece = self._detokenizer.feed(token)
        self.length += len(piece)
        if self._unstopped > 0:
            self._unstopped -= 1
            return piece
        return self._stops.feed(piece)

    def flush(self) -> str:
        return self._stops.flush()
