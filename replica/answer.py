"""Answer: one request's choices as they grow, from engine events to OpenAI bytes.

Laws: a choice ends once, with the engine's end or at its stop string, whichever is first; tokens
are counted up to that point and no further; the text that streams, joined, is the text of the
reply that does not stream.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from replica.core.sequence import Finish
from replica.generation import Event, Generation
from replica.replies import DONE, KEEP_ALIVE, Choice, Reply, fingerprint
from replica.text import GrowingText
from shared.messages import Usage


@dataclass(slots=True)
class GrowingChoice:
    """One sequence on its way to the client."""

    index: int
    seq_id: str
    text: GrowingText
    prompt_tokens: int  # 0 for all but the first choice of a prompt: it is billed once
    completion_tokens: int = 0
    begun: bool = False
    finish_reason: str | None = None
    parts: list[str] = field(default_factory=list)

    def take(self, event: Event) -> str:
        """The text this event adds; sets `finish_reason` when it is the last."""
        piece = ""
        if event.token is not None:
            self.completion_tokens += 1
            if event.finish is not Finish.STOP:  # the end token itself is no text
                piece = self.text.feed(event.token)
        if self.text.stopped:
            self.finish_reason = "stop"
        elif event.finish is not None:
            self.finish_reason = "stop" if event.finish is Finish.STOP else "length"
            piece += self.text.flush()
        return piece


class Answer:
    def __init__(
        self,
        *,
        reply: Reply,
        base_name: str,
        generation: Generation,
        choices: Sequence[GrowingChoice],
        keepalive_s: float,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.digest: str | None = None  # version of the adapter; "" is the base; None: not yet
        self._reply = reply
        self._base_name = base_name
        self._generation = generation
        self._choices = {choice.seq_id: choice for choice in choices}
        self._keepalive_s = keepalive_s
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    @property
    def usage(self) -> Usage:
        choices = self._choices.values()
        return Usage(
            prompt_tokens=sum(choice.prompt_tokens for choice in choices),
            completion_tokens=sum(choice.completion_tokens for choice in choices),
        )

    async def whole(self) -> bytes:
        """The body of a reply that is not streamed. Raises ReplicaError."""
        while not self._ended():
            for event in await self._generation.next(self._keepalive_s):
                choice, piece = self._take(event)
                choice.parts.append(piece)
        choices = [
            Choice(choice.index, "".join(choice.parts), choice.finish_reason or "stop")
            for choice in sorted(self._choices.values(), key=lambda choice: choice.index)
        ]
        return self._reply.whole(choices, self.usage)

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

    def _take(self, event: Event) -> tuple[GrowingChoice, str]:
        if self.digest is None:
            self.digest = event.digest
            self._reply.begin(fingerprint(self._base_name, event.digest))
        choice = self._choices[event.seq]
        if choice.finish_reason is not None:
            return choice, ""  # drawn before the engine heard of the stop string
        piece = choice.take(event)
        if choice.finish_reason is not None:
            self._generation.stop(event.seq)
        return choice, piece

    def _chunks(self, event: Event) -> bytes:
        choice, piece = self._take(event)
        usage = self.usage if self._continuous_usage else None
        blob = b""
        if not choice.begun:
            choice.begun = True
            blob += self._reply.role(choice.index, usage)
        if piece:
            blob += self._reply.text(choice.index, piece, usage)
        if choice.finish_reason is not None:
            blob += self._reply.end(choice.index, choice.finish_reason, usage)
        return blob
