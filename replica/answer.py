"""Answer: one request's choices as they grow, from engine events to OpenAI bytes.

Laws: a choice ends once, with the engine's end or at its stop string, whichever is first; tokens
are counted up to that point and no further; the text that streams, joined, is the text of the
reply that does not stream, and so are its log-probabilities. Of the candidates of each prompt the
`n` with the highest mean log-probability a token are returned, best first; all are counted.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from replica.core.sequence import Finish
from replica.echo import Echo
from replica.generation import Event, Generation
from replica.logprobs import Scored
from replica.replies import DONE, KEEP_ALIVE, Choice, Reply, fingerprint
from replica.text import GrowingText
from replica.tool_calls import ToolCall, ToolCalls
from shared.messages import Usage


@dataclass(slots=True)
class Piece:
    """What one event adds to a choice."""

    text: str = ""
    echoed: Sequence[Scored] = ()  # the prompt's tokens, before its own
    scored: Sequence[Scored] = ()
    calls: Sequence[ToolCall] = ()


@dataclass(slots=True)
class GrowingChoice:
    """One sequence on its way to the client."""

    index: int
    seq_id: str
    text: GrowingText
    prompt_tokens: int  # 0 for all but the first choice of a prompt: it is billed once
    echo: Echo = field(default_factory=Echo)  # the prompt, where it goes before the reply
    silent: bool = False  # nothing is wanted but the echo: what is drawn is dropped
    tools: ToolCalls | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0  # of its prompt's
    begun: bool = False
    finish_reason: str | None = None
    pieces: list[Piece] = field(default_factory=list)

    def take(self, event: Event) -> Piece:
        """What this event adds; sets `finish_reason` when it is the last."""
        piece = self._drop() if self.silent else self._grow(event)
        if self.tools is not None:
            self._call(piece, self.tools)
        if not self.begun:
            piece.text = self.echo.text + piece.text
            piece.echoed = self.echo.scored()
        return piece

    def _drop(self) -> Piece:
        self.finish_reason = "length"
        return Piece()

    def _grow(self, event: Event) -> Piece:
        piece = Piece()
        if event.token is not None:
            self.completion_tokens += 1
            self.cached_tokens += min(event.cached, self.prompt_tokens)
            if event.drawn is not None:
                piece.scored = [Scored(event.drawn, len(self.echo.text) + self.text.length)]
            if event.finish is not Finish.STOP:  # the end token itself is no text
                piece.text = self.text.feed(event.token)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif event.finish is not None:
            self.finish_reason = "stop" if event.finish is Finish.STOP else "length"
            piece.text += self.text.flush()
        return piece

    def _call(self, piece: Piece, tools: ToolCalls) -> None:
        piece.text, piece.calls = tools.feed(piece.text)
        if tools.stopped:
            self.finish_reason = "tool_calls"
        elif self.finish_reason is not None:
            piece.text += tools.flush()
            if tools.count and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"

    def finished(self, index: int) -> Choice:
        """All of it, as the choice `index` of the reply."""
        return Choice(
            index,
            "".join(piece.text for piece in self.pieces),
            self.finish_reason or "stop",
            [scored for piece in self.pieces for scored in (*piece.echoed, *piece.scored)],
            [call for piece in self.pieces for call in piece.calls],
        )

    @property
    def mean_logprob(self) -> float:
        values = [each.logprob for piece in self.pieces for each in piece.scored]
        return sum(values) / max(1, len(values))


class Answer:
    def __init__(
        self,
        *,
        reply: Reply,
        base_name: str,
        generation: Generation,
        choices: Sequence[GrowingChoice],
        keepalive_s: float,
        n: int = 1,
        candidates: int = 1,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.digest: str | None = None  # version of the adapter; "" is the base; None: not yet
        self._reply = reply
        self._base_name = base_name
        self._generation = generation
        self._choices = {choice.seq_id: choice for choice in choices}
        self._keepalive_s = keepalive_s
        self._n, self._candidates = n, candidates
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    @property
    def usage(self) -> Usage:
        choices = self._choices.values()
        return Usage(
            prompt_tokens=sum(choice.prompt_tokens for choice in choices),
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            cached_tokens=sum(choice.cached_tokens for choice in choices),
        )

    async def whole(self) -> bytes:
        """The body of a reply that is not streamed. Raises ReplicaError."""
        while not self._ended():
            for event in await self._generation.next(self._keepalive_s):
                choice, piece = self._take(event)
                if piece is not None:
                    choice.begun = True
                    choice.pieces.append(piece)
        choices = [each.finished(index) for index, each in enumerate(self._best())]
        return self._reply.whole(choices, self.usage)

    def _best(self) -> list[GrowingChoice]:
        """What is returned, prompt by prompt. Ties keep the order of the candidates."""
        choices = sorted(self._choices.values(), key=lambda choice: choice.index)
        if self._candidates == self._n:
            return choices
        best: list[GrowingChoice] = []
        for first in range(0, len(choices), self._candidates):
            candidates = choices[first : first + self._candidates]
            best += sorted(candidates, key=lambda each: -each.mean_logprob)[: self._n]
        return best

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Whole events, as many at once as there are. Raises ReplicaError.

        Silence is broken by a comment each `keepalive_s`. The last piece ends with `[DONE]`.
        """
        while True:
            events = await self._generation.next(self._keepalive_s)
            if not events:
                yield KEEP_ALIVE
                continue
            blob = b"".join([self._chunks(event) for event in events])
            if self._ended():
                yield blob + (self._reply.usage(self.usage) if self._include_usage else b"") + DONE
                return
            if blob:
                yield blob

    def _ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices.values())

    def _take(self, event: Event) -> tuple[GrowingChoice, Piece | None]:
        """What the event adds; None: nothing to send yet."""
        if self.digest is None:
            self.digest = event.digest
            self._reply.begin(fingerprint(self._base_name, event.digest))
        choice = self._choices[event.seq]
        if event.prompt is not None:
            choice.echo.take(event.prompt)
            return choice, None
        if choice.finish_reason is not None:
            return choice, Piece()  # drawn before the engine heard of the stop string
        piece = choice.take(event)
        if choice.finish_reason is not None:
            self._generation.stop(event.seq)
        return choice, piece

    def _chunks(self, event: Event) -> bytes:
        choice, piece = self._take(event)
        if piece is None:
            return b""
        usage = self.usage if self._continuous_usage else None
        blob = b""
        if not choice.begun:
            choice.begun = True
            blob += self._reply.role(choice.index, usage)
        blob += self._reply.text(choice.index, piece.text, usage, (*piece.echoed, *piece.scored))
        blob += self._reply.calls(choice.index, piece.calls, usage)
        if choice.finish_reason is not None:
            blob += self._reply.end(choice.index, choice.finish_reason, usage)
        return blob
