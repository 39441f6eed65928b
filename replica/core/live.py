"""Live: a sequence that has not ended, with what it holds in its scheduler.

Law: `slot` is its lease, from its first start to its end, so that it finishes on the weights it
began with; `table` is filled while it runs and empty while it waits. `pending` draws are under way:
their places count as if they were taken, their tokens are not in the sequence yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from replica.core.pages import BlockTable
from replica.core.prefix import PageNames
from replica.core.sequence import Finish, Sequence
from replica.core.step import BASE_SLOT, PENDING, Row


@dataclass(slots=True, eq=False)
class Live:
    seq: Sequence
    order: int  # of arrival; never changes
    queued_at: float
    length: int  # len(seq) + pending, kept because every plan asks
    length_max: int  # where it ends with LENGTH
    table: BlockTable = field(default_factory=BlockTable)
    slot: int = BASE_SLOT
    names: PageNames | None = None  # of its pages, once its weights are known
    published: int = 0  # how many of its first pages others can find by name
    admitted: bool = False  # it has started once, and so holds its slot if it needs one
    pending: int = 0  # draws of steps that are under way

    @property
    def to_feed(self) -> int:
        """Tokens whose keys and values are not in pages yet: 1 when decoding."""
        return self.length - self.seq.computed

    @property
    def waits(self) -> bool:
        """No further row before what is under way is known: it ends with that, or its next draw
        depends on the token itself."""
        seq = self.seq
        return self.pending > 0 and (
            self.length >= self.length_max or seq.grammar is not None or seq.sampling.penalises
        )

    def check(self, page_tokens: int) -> None:
        assert 0 <= self.seq.computed < self.length <= self.length_max
        assert self.length == len(self.seq) + self.pending
        assert self.seq.computed <= len(self.table) * page_tokens, "keys off its pages"

    def row(self, tokens: int) -> Row:
        """Its next `tokens` tokens, as part of a step."""
        seq, sampling = self.seq, self.seq.sampling
        start, output = seq.computed, seq.output
        decodes = tokens == 1 and self.length - start == 1 and (output or self.pending)
        newest = PENDING if self.pending else output[-1] if output else 0
        return Row(
            seq.id,
            self.slot,
            start,
            (newest,) if decodes else seq.between(start, start + tokens),
            self.table.frozen(),
            start + tokens == self.length,
            sampling,
            len(output) + self.pending,
            tuple(output) if seq.grammar is not None or sampling.penalises else (),
            seq.prompt if sampling.repeats_prompt else (),
            seq.grammar,
            seq.prompt[start + 1 : start + tokens + 1] if self.scores_prompt else (),
        )

    @property
    def scores_prompt(self) -> bool:
        """Its whole prompt is to be computed; what has drawn a token has told the scores."""
        return self.seq.sampling.prompt_logprobs and not self.seq.output

    def advance(self, row: Row) -> None:
        """The row is under way: what comes later finds it computed, and its token drawn."""
        self.seq.computed = row.end
        if row.samples:
            self.pending += 1
            self.length += 1

    def take(self, token: int, eos_ids: frozenset[int]) -> Finish | None:
        """Append what was drawn; whether the sequence ends with it."""
        self.pending -= 1
        self.seq.output.append(token)
        sampling = self.seq.sampling
        if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
            return Finish.STOP
        return Finish.LENGTH if self.length - self.pending >= self.length_max else None


def tokens_left(entries: Iterable[Live]) -> dict[int, int]:
    """By slot, how many tokens whoever has most before it may still draw."""
    left: dict[int, int] = {}
    for entry in entries:
        left[entry.slot] = max(left.get(entry.slot, 0), entry.length_max - entry.length)
    return left
