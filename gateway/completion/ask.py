"""What a client asks for: its body, checked once, and the body that goes to the replica.

The bytes go on as they came, with one addition: usage is always asked for, because the bill
depends on it (relay.py takes out again what the client did not ask for). Everything the gateway
does not need passes unseen, so that engines' own fields work; the exception are fields by which
an engine would select weights or a cache namespace: only `model` may do that, since only `model`
is checked against what the tenant may use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from gateway.core.cost import estimate_tokens
from gateway.errors import BadRequest

CHOICES_MAX: Final = 128
"""Largest `n` or `best_of`; OpenAI's own limit."""

_SPLICE: Final = b'{"stream_options":{"include_usage":true},'
_FORBIDDEN: Final = frozenset(
    (
        *("lora_request", "lora_name", "lora_path", "lora_id"),  # vLLM, SGLang
        *("adapter_id", "adapter_source", "custom_lora"),  # LoRAX, custom builds
        *("cache_salt", "extra_key"),  # prefix-cache namespaces
    )
)


class Ask(NamedTuple):
    model: str
    stream: bool
    keep_usage: bool  # the client asked for the usage event
    input_tokens: int  # estimate
    output_tokens: int  # most it may generate, over all choices
    body: bytes  # for the replica


def parse(raw: bytes, *, default_max_tokens: int) -> Ask:
    """Raises BadRequest, naming the field, or the byte where the text is not JSON."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        why = f"{error.msg}, at byte {_byte_at(raw, error)}"
        raise BadRequest(f"The body is not valid JSON: {why}.") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The body must be a JSON object, not {_kind(body)}.")
    if not _FORBIDDEN.isdisjoint(body):
        forbidden = min(_FORBIDDEN & body.keys())
        raise _bad(forbidden, "is not accepted: only `model` selects an adapter")
    model = _model(body)
    stream = _stream(body)
    options = _options(body) if "stream_options" in body else None
    per_choice = _count(body, "max_completion_tokens") or _count(body, "max_tokens")
    choices = 1
    if "n" in body or "best_of" in body:
        choices = max(_count(body, "n") or 1, _count(body, "best_of") or 1)
        if choices > CHOICES_MAX:
            raise _bad("n", f"must be at most {CHOICES_MAX}")
    return Ask(
        model=model,
        stream=stream,
        keep_usage=bool(options and options.get("include_usage")),
        input_tokens=_input_tokens(body, raw),
        output_tokens=(per_choice or default_max_tokens) * choices,
        body=_outgoing(raw, body, options) if stream else _unambiguous(raw, body),
    )


def _model(body: Mapping[str, Any]) -> str:
    if "model" not in body:
        raise BadRequest("You must name a `model`; GET /v1/models lists yours.", param="model")
    model = body["model"]
    if not isinstance(model, str) or not model:
        raise _bad("model", f"must be a non-empty string, not {_kind(model)}")
    return model


def _stream(body: Mapping[str, Any]) -> bool:
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _bad("stream", f"must be true or false, not {_kind(stream)}")
    return bool(stream)


def _options(body: Mapping[str, Any]) -> dict[str, Any] | None:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _bad("stream_options", f"must be an object, not {_kind(options)}")
    return options


def _count(body: Mapping[str, Any], field: str) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _bad(field, f"must be an integer, not {_kind(value)}")
    if value < 1:
        raise _bad(field, f"must be at least 1, not {value}")
    return value


def _input_tokens(body: Mapping[str, Any], raw: bytes) -> int:
    """Token ids count themselves; text counts by the size of what was sent."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], str):
        return sum(len(item) if isinstance(item, list) else 1 for item in prompt)
    return estimate_tokens(len(raw))


def _outgoing(raw: bytes, body: dict[str, Any], options: dict[str, Any] | None) -> bytes:
    if "stream_options" not in body:
        head, brace, rest = _unambiguous(raw, body).partition(b"{")
        assert brace
        return head + _SPLICE + rest
    if options is not None and options.get("include_usage") is True:
        return _unambiguous(raw, body)
    return orjson.dumps(body | {"stream_options": {**(options or {}), "include_usage": True}})


def _unambiguous(raw: bytes, body: dict[str, Any]) -> bytes:
    """What we checked is what the replica reads, also where a key is given twice.

    JSON parsers differ on which of two equal keys counts, so a body that may name `model` or
    `stream` twice (or spells a key with escapes) goes on as we understood it.
    """
    once = raw.count(b'"model"') == 1 and raw.count(b'"stream"') <= 1
    if once and b"\\u00" not in raw:
        return raw
    return orjson.dumps(body)


def _bad(field: str, fault: str) -> BadRequest:
    return BadRequest(f"`{field}` {fault}.", param=field)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string" if value else "an empty string"
        case list():
            return "an array"
        case _:
            return "an object"


def _byte_at(raw: bytes, error: orjson.JSONDecodeError) -> int:
    """orjson counts characters, and none where the text is not UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as broken:
        return broken.start
    return len(error.doc[: error.pos].encode(errors="replace"))
