"""What leaves a replica for one request: OpenAI bodies and stream chunks, byte for byte.

All chunks of a stream share `id`, `created`, `model` (what the request said) and
`system_fingerprint` (base name and the digest of the adapter's version), so all but the choice is
encoded once. Log-probabilities travel with the text of their tokens, or with none if it has none
yet. A usage chunk has `choices: []` and exists only when asked for; the other chunks
then say `usage: null`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from replica.logprobs import Scored, Spell, chat_logprobs, completion_logprobs
from replica.tool_calls import ToolCall
from shared.messages import Usage

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice of a reply that is not streamed."""

    index: int
    text: str
    finish_reason: str
    scored: Sequence[Scored] = ()
    calls: Sequence[ToolCall] = ()


def fingerprint(base: str, digest: str) -> str:
    """`system_fingerprint`: the base alone, or the base and which version of which adapter."""
    return f"{base}+{digest[:12]}" if digest else base


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Reply:
    """Builder of one request's bytes. `chat` says which of the two endpoints asked.

    `spell` is given when the client asked for log-probabilities.
    """

    __slots__ = (
        "_chat",
        "_created",
        "_head",
        "_id",
        "_model",
        "_null_usage",
        "_spell",
        "fingerprint",
    )

    def __init__(
        self,
        *,
        chat: bool,
        model: str,
        created: int,
        with_usage: bool = False,
        spell: Spell | None = None,
    ) -> None:
        self._chat = chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self._created = created
        self._spell = spell
        self._model = model
        self._null_usage = b',"usage":null' if with_usage else b""
        self._head = b""
        self.fingerprint = ""

    @property
    def id(self) -> str:
        return self._id

    def begin(self, fingerprint: str) -> None:
        """The adapter's version is known once the sequence holds its slot, not before."""
        self.fingerprint = fingerprint
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._head = b"data: " + orjson.dumps(self._envelope(kind))[:-1]

    def role(self, index: int, usage: Usage | None = None) -> bytes:
        """First chunk of a chat choice; completions have none."""
        if not self._chat:
            return b""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, usage)

    def text(
        self, index: int, text: str, usage: Usage | None = None, scored: Sequence[Scored] = ()
    ) -> bytes:
        """Nothing at all if there is neither text nor a log-probability to tell."""
        if not text and not (scored and self._spell):
            return b""
        content = {"content": text} if self._chat else text
        return self._chunk(index, content, None, usage, scored)

    def calls(self, index: int, calls: Sequence[ToolCall], usage: Usage | None = None) -> bytes:
        """Each call whole: clients join the pieces of its arguments, and one piece is enough."""
        if not calls:
            return b""
        whole = [{"index": call.index, **call.plain()} for call in calls]
        return self._chunk(index, {"tool_calls": whole}, None, usage)

    def end(self, index: int, finish_reason: str, usage: Usage | None = None) -> bytes:
        return self._chunk(index, {} if self._chat else "", finish_reason, usage)

    def usage(self, usage: Usage) -> bytes:
        return self._head + b',"choices":[],"usage":' + _dump(usage) + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The body of a reply that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        body = self._envelope(kind)
        body["choices"] = [self._choice(choice) for choice in choices]
        body["usage"] = usage_object(usage)
        return orjson.dumps(body)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk(
        self,
        index: int,
        content: dict[str, Any] | str,
        finish: str | None,
        usage: Usage | None,
        scored: Sequence[Scored] = (),
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta" if self._chat else "text": content}
        choice |= {"logprobs": self._logprobs(scored), "finish_reason": finish}
        tail = self._null_usage if usage is None else b',"usage":' + _dump(usage)
        return self._head + b',"choices":[' + orjson.dumps(choice) + b"]" + tail + b"}\n\n"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"text": choice.text}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text}
            message["refusal"] = None
            if choice.calls:
                message["content"] = choice.text or None
                message["tool_calls"] = [call.plain() for call in choice.calls]
            content = {"message": message}
        logprobs = self._logprobs(choice.scored)
        ending = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
        return {"index": choice.index, **content, **ending}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if self._spell is None or not scored:
            return None
        shape = chat_logprobs if self._chat else completion_logprobs
        return shape(scored, self._spell)


def _dump(usage: Usage) -> bytes:
    return orjson.dumps(usage_object(usage))
