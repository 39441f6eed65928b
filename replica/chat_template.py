"""Chat messages to one prompt text, by the template that came with the base's tokenizer.

The environment is the one `transformers` renders with (sandboxed Jinja, trimmed blocks, loop
controls, `raise_exception`, `tojson` without HTML escapes, `strftime_now`, the `generation` tag),
so the same messages give the same text as `apply_chat_template`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from replica.errors import BadRequest, Unsupported
from replica.tool_calls import CLOSING, OPENING

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_RESERVED = frozenset({"messages", "tools", "documents", *_SPECIAL})


class ChatTemplate:
    """Renders with what the base folder holds; a base without a template refuses to chat."""

    def __init__(self, source: str | None, tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._template = environment.from_string(source) if source is not None else None
        asks = jinja2.meta.find_undeclared_variables(environment.parse(source or ""))
        self.knows_tools = "tools" in asks  # else it would drop them without a word
        self._tokens = dict(tokens)
        self.marks_calls = source is not None and OPENING in source and CLOSING in source
        self._knows_developer = source is not None and "developer" in source

    @classmethod
    def from_dir(cls, folder: Path) -> ChatTemplate:
        config = _read_json(folder / "tokenizer_config.json")
        source = config.get("chat_template")
        if isinstance(source, list):  # named templates; the default one is meant
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        beside = folder / "chat_template.jinja"
        if beside.is_file():
            source = beside.read_text(encoding="utf-8")
        return cls(source, _special_tokens(folder, config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises BadRequest when the template refuses the messages."""
        if self._template is None:
            raise Unsupported(
                "The base model has no chat template; use /v1/completions.", param="messages"
            )
        extra = extra or {}
        if taken := sorted(_RESERVED & extra.keys()):
            raise BadRequest(
                f"chat_template_kwargs may not set {', '.join(taken)}.",
                param="chat_template_kwargs",
            )
        values: dict[str, Any] = {"documents": None, **self._tokens}
        values["tools"] = list(tools) or None
        values["add_generation_prompt"] = add_generation_prompt
        values |= extra
        values["messages"] = [self._message(message) for message in messages]
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise BadRequest(
                f"The chat template of the base refuses these messages: {error}", param="messages"
            ) from error

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._knows_developer:
            plain["role"] = "system"  # OpenAI's newer word for it, unknown to older templates
        if calls := plain.get("tool_calls"):
            plain["tool_calls"] = [_call(call) for call in calls]
        return plain


def _call(call: Any) -> Any:
    """Templates want the arguments as an object; clients send them back as the text they got."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        raise BadRequest(
            "`messages`: the arguments of a tool call are not JSON.", param="messages"
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)  # noqa: DTZ005 (local, as transformers has it)


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on, each a string or `{"content": …}`, from either of two files."""
    raw = {**_read_json(folder / "special_tokens_map.json"), **config}
    tokens = {}
    for name in _SPECIAL:
        value = raw.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
