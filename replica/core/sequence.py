"""Sequence: one request inside a replica, as token ids, counts and an end.

Law: `tokens == prompt + output`; the first `computed` of them have their keys and values in pages,
and `computed < len(sequence)` until it ends, because the newest token is always still to be fed.
A sequence that is preempted keeps its output and starts again, from `computed == 0` or from what
is still cached: recomputing the same tokens gives the same keys and values, so the text goes on
where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from shared.ids import AdapterId
from shared.messages import Tier


class Finish(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # the model drew an end token, or a token the request named as one
    LENGTH = "length"  # its own `max_tokens`, or the longest sequence this replica can hold
    ABORT = "abort"  # the client left, or the replica is closing
    ERROR = "error"  # its adapter failed or left, or the engine could not run it


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. `temperature == 0` takes the likeliest and uses no dice."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens stand
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, and what is added to its logit
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # before these are drawn, no token that would end it is
    logprobs: int | None = (
        None  # how many alternatives a token to report; None: none, not even its own
    )

    prompt_logprobs: bool = False  # the same for the prompt's own tokens, but the first

    @property
    def penalises(self) -> bool:
        """Whether the draw depends on what was drawn before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repeats_prompt

    @property
    def repeats_prompt(self) -> bool:
        """Whether it depends on the prompt's own tokens too."""
        return self.repetition_penalty != 1.0


class Grammar(Protocol):
    """What the text of one sequence must be. It belongs to that sequence alone."""

    def allowed(self, drawn: tuple[int, ...]) -> bytes | None:
        """The tokens that may follow `drawn`: a bit each, lowest first; at least one is set.

        Equal arguments give equal answers, whatever it keeps between calls; cheap when `drawn` is
        what it was, and a little more. None, and from then on always, when it cannot go on.
        """


class AdapterLoad(NamedTuple):
    """How a version came into its slot."""

    digest: str
    tier: Tier  # that it came from
    begun_at: float
    ended_at: float


@dataclass(slots=True, eq=False)
class Sequence:
    """Grown by its scheduler alone; others read it."""

    id: str
    adapter: AdapterId | None  # None: the base model
    prompt: tuple[int, ...]
    sampling: Sampling
    arrived_at: float
    grammar: Grammar | None = None
    salt: str = ""  # it shares cached pages with those alone who have the same
    output: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0  # tokens of the prompt that it found in cached pages when it first ran
    finish: Finish | None = None
    admitted_at: float | None = None  # when it first ran: minus `arrived_at`, its time in the queue
    ended_at: float | None = None
    preemptions: int = 0
    digest: str = ""  # the version of its adapter it runs on, known once admitted
    first_at: float | None = None  # when its first token was drawn; noted by its driver
    load: AdapterLoad | None = None  # of its adapter, likewise

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    def between(self, start: int, end: int) -> tuple[int, ...]:
        """`tokens[start:end]`, without building the rest."""
        prompt = len(self.prompt)
        if start >= prompt:
            return tuple(self.output[start - prompt : end - prompt])
        if end <= prompt:
            return self.prompt[start:end]
        return self.prompt[start:] + tuple(self.output[: end - prompt])

    def require_fit(self, length_max: int) -> None:
        """Raises ValueError, with what to do, unless it is new and can draw at least one token."""
        if self.output or self.computed or self.finish is not None:
            raise ValueError(f"sequence {self.id!r} has run before: make a new one")
        if not self.prompt:
            raise ValueError("the prompt has no tokens: send at least one")
        if self.sampling.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.sampling.max_tokens}: ask for at least 1")
        if len(self.prompt) >= length_max:
            raise ValueError(
                f"the prompt has {len(self.prompt)} tokens, and this replica holds sequences of "
                f"{length_max} tokens, answer included: shorten the prompt to at most "
                f"{length_max - 1} tokens"
            )
