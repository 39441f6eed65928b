"""OpenAI request bodies: read once, every fault named by its field, nothing ignored in silence.

Four classes of field:
- those we do: typed and ranged below;
- those that would select weights or a cache namespace besides `model`: refused, always;
- those we know and do not do: refused, unless their value asks for nothing;
- the rest (`user`, `metadata`, `store`, what we never heard of): let through without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from replica.errors import BadRequest, Unsupported

STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 1024
PROMPTS_MAX: Final = 128

WEIGHT_FIELDS: Final = frozenset(
    {
        "adapter",
        "adapter_id",
        "adapter_source",
        "cache_namespace",
        "cache_salt",
        "extra_key",
        "id_slot",
        "lora",
        "lora_adapter",
        "lora_id",
        "lora_int_id",
        "lora_modules",
        "lora_name",
        "lora_path",
        "lora_request",
        "merged_adapters",
    }
)
"""Ways other servers have of choosing weights or cache. Here `model` alone does."""

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": ("",),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "regex": ("",),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known and not done, with the values (besides null) that ask for nothing."""


def _stops(value: Any) -> Any:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"must be a string or a list of at most {STOPS_MAX} strings")
    if len(stops) > STOPS_MAX:
        raise ValueError(f"has {len(stops)} strings; at most {STOPS_MAX} are allowed")
    if any(len(stop) > STOP_CHARS_MAX for stop in stops):
        raise ValueError(f"has a string of more than {STOP_CHARS_MAX} characters")
    return [stop for stop in stops if stop]


def _content(value: Any) -> Any:
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


def _prompts(value: Any) -> list[str | list[int]]:
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


def _or(default: Any) -> BeforeValidator:
    """OpenAI reads null as "the default"."""
    return BeforeValidator(lambda value: default if value is None else value)


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(Body):
    include_usage: Annotated[bool, _or(False)] = False
    continuous_usage_stats: Annotated[bool, _or(False)] = False


class Message(Body):
    role: str = Field(min_length=1, max_length=64)
    content: Annotated[str | None, BeforeValidator(_content)] = Field(None, validate_default=True)

    @field_validator("content")
    @classmethod
    def _is_there(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("is required")
        return content

    def plain(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **(self.model_extra or {})}


class GenerationRequest(Body):
    """What chat and completions have in common."""

    model: str = Field(min_length=1, max_length=512)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    n: Annotated[int, _or(1)] = Field(1, ge=1, le=128)
    stream: Annotated[bool, _or(False)] = False
    stream_options: Annotated[StreamOptions, _or({})] = StreamOptions()
    temperature: Annotated[float, _or(1.0)] = Field(1.0, ge=0, le=2)
    top_p: Annotated[float, _or(1.0)] = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, _or(0)] = Field(0, ge=-1, lt=1 << 31)
    min_p: Annotated[float, _or(0.0)] = Field(0.0, ge=0, le=1)
    presence_penalty: Annotated[float, _or(0.0)] = Field(0.0, ge=-2, le=2)
    frequency_penalty: Annotated[float, _or(0.0)] = Field(0.0, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], _or([])] = Field(default_factory=list, max_length=64)
    ignore_eos: Annotated[bool, _or(False)] = False
    skip_special_tokens: Annotated[bool, _or(True)] = True

    @property
    def tokens_max(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: Annotated[bool, _or(True)] = True
    chat_template_kwargs: Annotated[dict[str, Any], _or({})] = Field(default_factory=dict)


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts)]


B = TypeVar("B", bound=BaseModel)
G = TypeVar("G", bound=GenerationRequest)


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object. Raises BadRequest with the byte at which it stops being one."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        at = _byte_offset(data, error.pos)
        raise BadRequest(
            f"The body is not valid JSON at byte {at}: {error.msg}.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    return value


def parse(kind: type[B], raw: Mapping[str, Any]) -> B:
    """Validate; the first fault becomes the error, named by its field."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        param = _param(fault["loc"])
        missing = fault["type"] == "missing"
        text = fault["msg"].removeprefix("Value error, ")
        raise BadRequest(
            f"`{param}`: {text}.",
            param=param,
            code="missing_required_parameter" if missing else "invalid_value",
        ) from None


def parse_generation(kind: type[G], raw: Mapping[str, Any]) -> G:
    """A request to generate: first what it must not ask for, then what it asks for."""
    for field, value in raw.items():
        if value is None:
            continue
        if field in WEIGHT_FIELDS:
            raise BadRequest(
                f"`{field}` is not allowed: `model` alone selects weights and cache.",
                param=field,
                code="field_not_allowed",
            )
        if field in _NEUTRAL and not _asks_for_nothing(field, value):
            raise Unsupported(f"`{field}` is not supported by this replica.", param=field)
    return parse(kind, raw)


def _asks_for_nothing(field: str, value: Any) -> bool:
    encoded = orjson.dumps(value)  # 0 and False are equal in Python, not in JSON
    return any(encoded == orjson.dumps(neutral) for neutral in _NEUTRAL[field])


def _param(loc: tuple[int | str, ...]) -> str:
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name or "body"


def _byte_offset(data: bytes, characters: int) -> int:
    """orjson counts characters; what is not UTF-8 stops at its first bad byte."""
    try:
        return len(data.decode()[:characters].encode())
    except UnicodeDecodeError as error:
        return error.start
