"""OpenAI request bodies: read once, every fault named by its field, nothing ignored in silence.

Four classes of field:
- those we do: typed and ranged below, brought to one form by `fields.py`;
- those that would select weights or a cache namespace besides `model`: refused, always;
- those we know and do not do: refused, unless their value asks for nothing (`refused.py`);
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

from replica import fields
from replica.errors import BadRequest
from replica.refused import refuse

LOGPROBS_MAX: Final = 20


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
    content: Annotated[str | None, BeforeValidator(fields.content)] = Field(
        None, validate_default=True
    )

    @field_validator("content")
    @classmethod
    def _is_there(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and info.data.get("role") != "assistant":
            raise ValueError("is required")
        return content

    @property
    def calls(self) -> bool:
        """Whether an assistant's turn called instead of saying something."""
        extra = self.model_extra or {}
        return bool(extra.get("tool_calls") or extra.get("function_call"))

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
    repetition_penalty: Annotated[float, _or(1.0)] = Field(1.0, gt=0, le=10)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(fields.logit_bias)] = ()
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[str], BeforeValidator(fields.stops)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], _or([])] = Field(default_factory=list, max_length=64)
    ignore_eos: Annotated[bool, _or(False)] = False
    min_tokens: Annotated[int, _or(0)] = Field(0, ge=0, lt=1 << 31)
    response_format: Annotated[dict[str, Any] | None, BeforeValidator(fields.format_schema)] = None
    guided_json: Annotated[dict[str, Any] | None, BeforeValidator(fields.guided_schema)] = None
    skip_special_tokens: Annotated[bool, _or(True)] = True

    @property
    def tokens_max(self) -> int | None:
        """The most tokens to draw; None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def candidates(self) -> int:
        """Choices that are generated for each prompt; `n` of them are returned."""
        return self.n

    @property
    def top_wanted(self) -> int | None:
        """Alternatives a token to report; None: no log-probabilities."""
        return None

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's own tokens are to have log-probabilities."""
        return False

    @property
    def schema_field(self) -> str:
        """The field that has a JSON schema for the reply; empty if none does."""
        asked = ("response_format", "guided_json")
        return next((field for field in asked if getattr(self, field) is not None), "")

    def check(self) -> None:
        """What fields ask of each other. Raises BadRequest."""
        if self.tokens_max is not None and self.min_tokens > self.tokens_max:
            raise _clash("min_tokens", f"is more than the limit of {self.tokens_max} tokens")
        if field := self.schema_field:
            if self.guided_json is not None and field != "guided_json":
                raise _clash("guided_json", f"cannot be combined with `{field}`")
            if self.ignore_eos:
                raise _clash("ignore_eos", f"cannot be combined with `{field}`, which has an end")
            if self.min_tokens:
                raise _clash("min_tokens", f"cannot be combined with `{field}`, which has an end")


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: Annotated[bool, _or(True)] = True
    chat_template_kwargs: Annotated[dict[str, Any], _or({})] = Field(default_factory=dict)
    logprobs: Annotated[bool, _or(False)] = False
    top_logprobs: Annotated[int, _or(0)] = Field(0, ge=0, le=LOGPROBS_MAX)
    tools: Annotated[list[dict[str, Any]], BeforeValidator(fields.tools)] = Field(
        default_factory=list
    )
    parallel_tool_calls: Annotated[bool, _or(True)] = True

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """What the template is to show; `refused.py` lets no forced choice come this far."""
        return [] if (self.model_extra or {}).get("tool_choice") == "none" else self.tools

    @property
    def top_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        for index, message in enumerate(self.messages):
            if message.content is None and not message.calls:
                raise _clash(
                    f"messages[{index}].content", "is required, unless the message has `tool_calls`"
                )
        if self.top_logprobs and not self.logprobs:
            raise _clash("top_logprobs", "needs `logprobs` to be true")


class CompletionRequest(GenerationRequest):
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    prompt: Annotated[list[str | list[int]], PlainValidator(fields.prompts)]
    logprobs: int | None = Field(None, ge=0, le=LOGPROBS_MAX)
    echo: Annotated[bool, _or(False)] = False
    best_of: int | None = Field(None, ge=1, le=128)

    @property
    def candidates(self) -> int:
        return self.best_of or self.n

    @property
    def top_wanted(self) -> int | None:
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    def check(self) -> None:
        super().check()
        if self.candidates < self.n:
            raise _clash("best_of", f"must be at least `n`, which is {self.n}")
        if self.candidates > self.n and self.stream:
            raise _clash("best_of", "cannot be streamed: the best is known at the end")
        if self.tokens_max == 0 and not self.echo:
            raise _clash("max_tokens", "is 0, which needs `echo`: there would be nothing to return")


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
    refuse(raw, own=kind.model_fields.keys())
    body = parse(kind, raw)
    body.check()
    return body


def _clash(param: str, text: str) -> BadRequest:
    return BadRequest(f"`{param}` {text}.", param=param)


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
