"""Single fields of a request whose JSON takes several forms: each brought to one form.

A function takes what the body has and gives what `protocol.py` types; it raises ValueError with
text that goes on from the field's name.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 1024
PROMPTS_MAX: Final = 128
BIASES_MAX: Final = 1024
BIAS_MAX: Final = 100
TOOLS_MAX: Final = 128


def stops(value: Any) -> Any:
    if value is None:
        return []
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(stop, str) for stop in given):
        raise ValueError(f"must be a string or a list of at most {STOPS_MAX} strings")
    if len(given) > STOPS_MAX:
        raise ValueError(f"has {len(given)} strings; at most {STOPS_MAX} are allowed")
    if any(len(stop) > STOP_CHARS_MAX for stop in given):
        raise ValueError(f"has a string of more than {STOP_CHARS_MAX} characters")
    return [stop for stop in given if stop]


def content(value: Any) -> Any:
    """A string as it is; a parts array as its texts, one below the other."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or an array of parts")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} is not text: this model reads text only")
        texts.append(part["text"])
    return "\n".join(texts)


def prompts(value: Any) -> list[str | list[int]]:
    """A string, strings, token ids, or lists of token ids: one prompt each."""
    if isinstance(value, str) or _is_tokens(value):
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, token ids, or lists of token ids")
    if len(value) > PROMPTS_MAX:
        raise ValueError(f"has {len(value)} prompts; at most {PROMPTS_MAX} are allowed")
    for index, prompt in enumerate(value):
        if not isinstance(prompt, str) and not _is_tokens(prompt):
            raise ValueError(f"item {index} is neither a string nor a non-empty list of token ids")
    return value


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def logit_bias(value: Any) -> Any:
    """`{"1234": -100}` as pairs of token and bias, by token."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids to numbers")
    if len(value) > BIASES_MAX:
        raise ValueError(f"has {len(value)} tokens; at most {BIASES_MAX} are allowed")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit()) or len(key) > 9:
            raise ValueError(f"{key!r:.40} is no token id")
        if type(bias) not in (int, float) or not -BIAS_MAX <= bias <= BIAS_MAX:
            raise ValueError(f"of token {key} must be a number from -{BIAS_MAX} to {BIAS_MAX}")
        biases[int(key)] = float(bias)
    return tuple(sorted(biases.items()))


def format_schema(value: Any) -> Any:
    """`response_format` as the JSON schema that it asks for; None for free text."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise ValueError('must have the type "text", "json_object" or "json_schema"')
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ValueError("has no schema: put a JSON schema at `json_schema.schema`")
    return schema


def guided_schema(value: Any) -> Any:
    """vLLM's `guided_json`: a schema, or a schema as text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise ValueError("is text that is not valid JSON") from None
    if value is not None and not isinstance(value, dict):
        raise ValueError("must be a JSON schema: an object")
    return value


def tools(value: Any) -> Any:
    """Functions only, as they are: the chat template writes them into the prompt."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError("must be an array")
    if len(value) > TOOLS_MAX:
        raise ValueError(f"has {len(value)} tools; at most {TOOLS_MAX} are allowed")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise ValueError(f"item {index} is no function")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise ValueError(f"item {index} has no function.name")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise ValueError(f"item {index}: function.parameters must be a JSON schema")
    return value
