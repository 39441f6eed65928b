"""Tool calls in a growing text, in the one form that is safe to read: Hermes'.

    <tool_call>{"name": "…", "arguments": {…}}</tool_call>

It is what the templates of Qwen, Hermes and many others ask for; `ChatTemplate.marks_calls` says
whether this base's does. Laws: what is between the marks is a call exactly if it is such an object,
with the name of an offered tool, and otherwise it is text, marks and all: nothing the model said is
lost, and no call is made up. What comes is the same however the text is cut. Blanks after a call
are part of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import orjson

from replica.stop_strings import overlap

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    index: int  # among the calls of its choice
    id: str
    name: str
    arguments: str  # JSON

    def plain(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ToolCalls:
    """Text in, text and calls out; `stopped` after the first call unless `parallel`."""

    __slots__ = ("_after_call", "_held", "_names", "_parallel", "count", "stopped")

    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        self._names = frozenset(names)
        self._parallel = parallel
        self._held = ""
        self._after_call = False  # and no text has come since
        self.count = 0
        self.stopped = False

    def feed(self, piece: str) -> tuple[str, list[ToolCall]]:
        """What may leave now. All that could still become a call is held back."""
        self._held += piece
        text, calls = "", []
        while not self.stopped:
            before, opened, rest = self._held.partition(OPENING)
            if not opened:
                keep = overlap(before, OPENING)
                text += self._say(before[: len(before) - keep])
                self._held = before[len(before) - keep :]
                break
            text += self._say(before)
            inside, closed, rest = rest.partition(CLOSING)
            if not closed:
                self._held = opened + inside
                break
            self._held = rest
            call = self._read(inside)
            if call is None:
                text += self._say(opened + inside + closed)
            else:
                calls.append(call)
                self.count += 1
                self._after_call = True
                self.stopped = not self._parallel
        return text, calls

    def _say(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def flush(self) -> str:
        """The text is over: what was held back is no call."""
        rest, self._held = self._held, ""
        return "" if self.stopped else self._say(rest)

    def _read(self, inside: str) -> ToolCall | None:
        try:
            said = orjson.loads(inside)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(said, dict) or said.keys() != {"name", "arguments"}:
            return None
        name, arguments = said["name"], said["arguments"]
        if name not in self._names or not isinstance(arguments, dict):
            return None
        call_id = f"call_{uuid.uuid4().hex}"
        return ToolCall(self.count, call_id, name, orjson.dumps(arguments).decode())
