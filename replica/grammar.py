"""Grammars: JSON by a schema, as masks over the vocabulary. The one owner of llguidance.

Law: what is drawn under a grammar's masks until an end token is one JSON document of its schema.
Once the document is complete only end tokens are allowed; a reply that its `max_tokens` or a stop
string cuts short is a beginning of one. Runs of blanks between values are bounded, since a weak
model may like them for ever. What the library cannot enforce it refuses, and so do we: no part of
a schema is ignored.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from replica.errors import BadRequest

SCHEMA_BYTES_MAX: Final = 64 << 10
_BLANKS: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_REASON_CHARS: Final = 300


class JsonGrammar:
    """A `Grammar` of the core: a matcher that has consumed the first tokens of what was drawn."""

    __slots__ = ("_consumed", "_matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._consumed: tuple[int, ...] = ()

    def copy(self) -> JsonGrammar:
        """A new one, from the beginning."""
        matcher = self._matcher.deep_copy()
        matcher.reset()
        return JsonGrammar(matcher)

    def allowed(self, drawn: tuple[int, ...]) -> bytes | None:
        known = len(self._consumed)
        if drawn[:known] != self._consumed:
            self._matcher.reset()
            known = 0
        self._consumed = drawn
        if not self._matcher.consume_tokens(list(drawn[known:])):
            return None
        mask = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else mask


class Grammars:
    """Makes grammars for one base. Thread-safe; compiling may take a tenth of a second."""

    def __init__(self, base: Path, *, vocab_size: int, ends: frozenset[int]) -> None:
        self._path = base / "tokenizer.json"
        self._vocab_size = vocab_size
        self._ends = ends

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made when first needed, for a large vocabulary takes it a second."""
        ends = sorted(self._ends)
        return LLTokenizer(str(self._path), n_vocab=self._vocab_size, eos_token=ends)

    def compile(self, schema: dict[str, Any], *, param: str) -> JsonGrammar:
        """Raises BadRequest, naming `param`, for a schema that cannot be enforced."""
        if len(json.dumps(schema)) > SCHEMA_BYTES_MAX:
            raise BadRequest(
                f"`{param}`: the schema is larger than {SCHEMA_BYTES_MAX} bytes.", param=param
            )
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_BLANKS)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error()[:_REASON_CHARS]
            raise BadRequest(
                f"`{param}`: this schema cannot be enforced: {reason}.",
                param=param,
                code="invalid_json_schema",
            )
        return JsonGrammar(matcher)
