"""What leaves a replica for one request: OpenAI bodies and stream chunks, byte for byte.

All chunks of a stream share `id`, `created`, `model` (what the request said) and
`system_fingerprint` (base name and the digest of the adapter's version), so all but the choice is
encoded once. A usage chunk has `choices: []` and exists only when asked for; the other chunks
then say `usage: null`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from shared.messages import Usage

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice of a reply that is not streamed."""

    index: int
    text: str
    finish_reason: str


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
    """Builder of one request's bytes. `chat` says which of the two endpoints asked."""

    __slots__ = ("_chat", "_created", "_head", "_id", "_model", "_null_usage", "fingerprint")

    def __init__(self, *, chat: bool, model: str, created: int, with_usage: bool = False) -> None:
        self._chat = chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self._created = created
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

    def text(self, index: int, text: str, usage: Usage | None = None) -> bytes:
        return self._chunk(index, {"content": text} if self._chat else text, None, usage)

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
        self, index: int, content: dict[str, str] | str, finish: str | None, usage: Usage | None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta" if self._chat else "text": content}
        choice |= {"logprobs": None, "finish_reason": finish}
        tail = self._null_usage if usage is None else b',"usage":' + _dump(usage)
        return self._head + b',"choices":[' + orjson.dumps(choice) + b"]" + tail + b"}\n\n"

    def _choice(self, choice: Choice) -> dict[str, Any]:
        content: dict[str, Any] = {"text": choice.text}
        if self._chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            content = {"message": message}
        ending = {"logprobs": None, "finish_reason": choice.finish_reason}
        return {"index": choice.index, **content, **ending}


def _dump(usage: Usage) -> bytes:
    return orjson.dumps(usage_object(usage))
