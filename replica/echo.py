"""Echo: a prompt before its completion, and what the model thought of its tokens if that is asked.

As OpenAI's completions give it: the lists of `logprobs` begin with the prompt's tokens. The first
has no log-probability, for nothing comes before it. `text_offset` counts characters of the echoed
text; what the tokenizer put before it (a start token) stands at 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica.engine.sampler import Drawn
from replica.generation import PromptScores
from replica.logprobs import Scored
from replica.text import Detokenizer, Vocabulary


class Echo:
    """One choice's own. `offsets` are its tokens' places in `text`."""

    __slots__ = ("_offsets", "_scores", "_tokens", "text")

    def __init__(
        self, text: str = "", tokens: Sequence[int] = (), offsets: Sequence[int] = ()
    ) -> None:
        self.text = text
        self._tokens = tokens
        self._offsets = offsets
        self._scores: list[Drawn] = []  # of the second token and those after it

    def take(self, scores: PromptScores) -> None:
        """A chunk's; after a preemption they come again from the first on."""
        del self._scores[scores.start :]
        self._scores += scores.tokens

    def scored(self) -> list[Scored]:
        """Every token of the prompt; none where no scores were asked for."""
        if not self._tokens:
            return []
        every = [Drawn(self._tokens[0]), *self._scores]
        return [Scored(*each) for each in zip(every, self._offsets, strict=True)]


def offsets(vocabulary: Vocabulary, text: str, tokens: Sequence[int]) -> list[int]:
    """Where each token begins in `text`: after the characters that those before it settled."""
    detokenizer = Detokenizer(vocabulary, skip_special=False)
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(detokenizer.feed(token)))
    lead = ends.pop() - len(text)  # characters of what was put before it
    return [min(max(end - lead, 0), len(text)) for end in ends]
