"""Live: a sequence that has not ended, with what it holds in its scheduler.

Law: `slot` is its lease, from its first start to its end, so that it finishes on the weights it
began with; `table` is filled while it runs and empty while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replica.core.pages import BlockTable
from replica.core.sequence import Finish, Sequence
from replica.core.step import BASE_SLOT, Row


@dataclass(slots=True, eq=False)
class Live:
    seq: Sequence
    order: int  # of arrival; never changes
    queued_at: float
    length: int  # len(seq), kept because every plan asks
    length_max: int  # where it ends with LENGTH
    table: BlockTable = field(default_factory=BlockTable)
    slot: int = BASE_SLOT
    admitted: bool = False  # it has started once, and so holds its slot if it needs one

    @property
    def to_feed(self) -> int:
        """Tokens whose keys and values are not in pages yet: 1 when decoding."""
        return self.length - self.seq.computed

    def row(self, tokens: int) -> Row:
        """Its next `tokens` tokens, as part of a step."""
        seq, sampling = self.seq, self.seq.sampling
        start, output = seq.computed, seq.output
        decodes = tokens == 1 and self.length - start == 1 and output
        return Row(
            seq.id,
            self.slot,
            start,
            (output[-1],) if decodes else seq.between(start, start + tokens),
            self.table.frozen(),
            start + tokens == self.length,
            sampling,
            len(output),
            tuple(output) if seq.grammar is not None or sampling.penalises else (),
            seq.prompt if sampling.repeats_prompt else (),
            seq.grammar,
            seq.prompt[start + 1 : start + tokens + 1] if self._scores_prompt else (),
        )

    @property
    def _scores_prompt(self) -> bool:
        """Once: what has drawn a token has told its prompt's scores."""
        return self.seq.sampling.prompt_logprobs and not self.seq.output

    def take(self, token: int, eos_ids: frozenset[int]) -> Finish | None:
        """Append what was drawn; whether the sequence ends with it."""
        self.seq.output.append(token)
        self.length += 1
        sampling = self.seq.sampling
        if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
            return Finish.STOP
        return Finish.LENGTH if self.length >= self.length_max else None
