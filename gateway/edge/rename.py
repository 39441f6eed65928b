"""`model` in a reply is the name that was asked for, also when the replica knows another one.

An alias (`base:adapter`, `name@version`) is not what the replica is asked for, and some engines
answer with their base's name whatever was asked. The name is put in by its place in the text: no
other byte changes, so numbers, escapes and unknown fields are the replica's own. This is the slow
path; `correction` says whether a stream needs it, from its first event.
"""

from __future__ import annotations

import re
from typing import Final

import orjson

from shared.framing import each_event

_MODEL: Final = re.compile(rb'"model"\s*:\s*("[^"\\]*")')
_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]', re.DOTALL)


def model_at(text: bytes) -> tuple[int, int] | None:
    """Where the string that is `model` of the outermost object stands, quotes included."""
    depth, is_key, found = 0, False, False
    for token in _TOKEN.finditer(text, max(0, text.find(b"{"))):
        match token[0]:
            case b"{" | b"[":
                depth += 1
                is_key, found = depth == 1, False  # a value that is no string is no name
            case b"}" | b"]":
                depth -= 1
                if depth == 0:
                    return None
            case b",":
                is_key, found = depth == 1, False
            case b":":
                is_key = False
            case _ if found:
                return token.span()
            case string:
                found = is_key and string == b'"model"'
    return None


def renamed(text: bytes, name: str) -> bytes:
    """A JSON object, or one SSE event of one, with `model` put to `name`; else as it was."""
    at = model_at(text)
    return text if at is None else text[: at[0]] + orjson.dumps(name) + text[at[1] :]


def correction(blob: bytes, name: str) -> tuple[bytes, bytes]:
    """How the first of these events that tells a model writes it, with its key, and how it should.

    Two times nothing when it is right, or none tells one. These bytes cannot stand in a JSON
    string, where quotes are escaped, so the quick look cannot be deceived by a text either.
    """
    quoted = orjson.dumps(name)
    for event in each_event(blob):
        if b'"model":' + quoted in event or b'"model": ' + quoted in event:
            break
        if (at := model_at(event)) is not None:
            if _read(event[at[0] : at[1]]) == name:
                break
            key = event[event.rfind(b'"model"', 0, at[0]) : at[0]]
            return key + event[at[0] : at[1]], key + quoted
    return b"", b""


def opening(chunk: bytes, name: str) -> tuple[bytes, bytes]:
    """Of one event in a chunk of its own: its text from the first byte to the end of `model`'s
    value, and the same with `name` there. Two times nothing when it tells no model.

    An event that begins with these bytes has its `model` there too, because what a JSON parser
    has read by then is the same; so what follows is never looked at.
    """
    at = model_at(chunk)
    if at is None:
        return b"", b""
    return chunk[: at[1]], chunk[: at[0]] + orjson.dumps(name)


def renamed_events(blob: bytes, name: str) -> bytes:
    """`renamed` for each of several whole events."""
    return b"".join(renamed(event, name) for event in each_event(blob))


def renamed_whole(body: bytes, name: str) -> bytes:
    """`renamed` of an object that is known to have a `model` that is a string.

    The one place where the text says `"model":"…"` is then that one.
    """
    found = _MODEL.search(body) if body.count(b'"model"') == 1 else None
    if found is None:
        return renamed(body, name)
    return body[: found.start(1)] + orjson.dumps(name) + body[found.end(1) :]


def _read(string: bytes) -> object:
    try:
        return orjson.loads(string)
    except orjson.JSONDecodeError:
        return None
