"""Step: what one forward pass computes, said in values that the engine turns into tensors.

Law: a row is one stretch of one sequence, and a sequence has at most one row a step; rows with
equal slots are adjacent (`segments.py` reads that); a row's pages cover every token up to its end,
and those that none of its tokens sees may be RELEASED (`pages.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from replica.core.sequence import Finish, Grammar, Sampling

BASE_SLOT: Final = -1
"""The slot of a row without adapter. No kernel may index with it."""

PENDING: Final = -1
"""In a row's tokens: what the step before it draws for that sequence, not known here yet."""


class Row(NamedTuple):
    """`tokens` stand at positions `start ..` of sequence `seq`; everything before is in `pages`.

    A named tuple, for every step makes one a sequence and a frozen dataclass takes four times as
    long to make.
    """

    seq: str
    slot: int  # BASE_SLOT: no adapter
    start: int
    tokens: tuple[int, ...]  # one when decoding, a chunk of the prompt when prefilling
    pages: tuple[int, ...]  # block table; covers `end`, and may reach beyond it
    samples: bool  # the row ends its sequence: draw the next token
    sampling: Sampling
    drawn: int  # tokens drawn so far: with the seed, names the dice of this position
    output: tuple[int, ...] = ()  # what was drawn, only where penalties or a grammar need it
    prompt: tuple[int, ...] = ()  # only where a repetition penalty needs it
    grammar: Grammar | None = None
    targets: tuple[int, ...] = ()  # prompt tokens to score, from `start + 1` on; at most as many

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    rows: tuple[Row, ...]

    @property
    def total_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        """Of rows with more than one, which only prompts have."""
        return sum(len(row.tokens) for row in self.rows if len(row.tokens) > 1)

    def scoring(self) -> Iterator[tuple[int, Row]]:
        """Rows with targets, and where their tokens begin in the step."""
        starts = accumulate((len(row.tokens) for row in self.rows), initial=0)
        return ((at, row) for at, row in zip(starts, self.rows, strict=False) if row.targets)


class Progress(NamedTuple):
    """What happened to one sequence: a token, an end, or both."""

    seq: str
    token: int | None  # None: it ended without drawing
    finish: Finish | None = None
    reason: str = ""  # for people, when `finish` is ERROR
