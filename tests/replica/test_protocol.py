"""Bodies of requests: every fault names its field, nothing is ignored in silence."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.errors import BadRequest, Unsupported
from replica.protocol import ChatRequest, CompletionRequest, parse_generation, parse_json
from replica.refused import WEIGHT_FIELDS

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def _refused(body: dict[str, Any], kind: Any = ChatRequest) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_generation(kind, body)
    return caught.value


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*CHAT["messages"], {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        (
            {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": []}]},
            "messages[1].content",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ],
)
def test_a_value_that_is_wrong_is_refused_by_its_name(change: dict[str, Any], param: str) -> None:
    error = _refused({**CHAT, **change})
    assert (error.status, error.param) == (400, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
def test_what_is_wrong_in_a_completion_is_refused_by_its_name(
    change: dict[str, Any], param: str
) -> None:
    assert _refused({**COMPLETION, **change}, CompletionRequest).param == param


def test_a_field_that_is_missing_is_named() -> None:
    assert _refused({"messages": CHAT["messages"]}).param == "model"
    assert _refused({"model": "m"}).reason == "missing_required_parameter"
    assert _refused({"model": "m"}, CompletionRequest).param == "prompt"


@pytest.mark.parametrize("field", sorted(WEIGHT_FIELDS))
def test_only_model_selects_weights_or_cache(field: str) -> None:
    for kind, body in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION)):
        error = _refused({**body, field: "x"}, kind)
        assert (error.param, error.reason) == (field, "field_not_allowed")
    parse_generation(ChatRequest, {**CHAT, field: None})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("best_of", 2),
        ("echo", True),
        ("suffix", "x"),
        ("guided_regex", "a+"),
        ("structured_outputs", {"regex": "a+"}),
        ("return_tokens_as_token_ids", True),
        ("modalities", ["audio"]),
    ],
)
def test_what_is_not_done_is_refused_by_its_name(field: str, value: Any) -> None:
    with pytest.raises(Unsupported) as caught:
        parse_generation(ChatRequest, {**CHAT, field: value})
    assert (caught.value.param, caught.value.reason) == (field, "unsupported")


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "logprobs": False, "top_logprobs": None},
        {"logit_bias": {}, "echo": False, "best_of": 1, "suffix": None},
        {"something_new": {"deep": [1]}},
    ],
)
def test_what_asks_for_nothing_passes(harmless: dict[str, Any]) -> None:
    parse_generation(ChatRequest, {**CHAT, **harmless})


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "max_tokens"]
    )
    assert parse_generation(ChatRequest, {**CHAT, **nulls}) == parse_generation(ChatRequest, CHAT)


def test_text_parts_become_lines_and_other_fields_of_a_message_reach_the_template() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {**CHAT, "messages": [{"role": "user", "content": parts, "name": "ann"}]}
    [message] = parse_generation(ChatRequest, body).messages
    assert message.plain() == {"role": "user", "content": "one\ntwo", "name": "ann"}


def test_the_newer_name_of_the_token_limit_wins() -> None:
    body = {**CHAT, "max_tokens": 5, "max_completion_tokens": 7}
    assert parse_generation(ChatRequest, body).tokens_max == 7
    assert parse_generation(ChatRequest, {**CHAT, "max_tokens": 5}).tokens_max == 5
    assert parse_generation(ChatRequest, CHAT).tokens_max is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_text_or_tokens_once_or_several_times(prompt: Any, prompts: Any) -> None:
    body = {**COMPLETION, "prompt": prompt}
    assert parse_generation(CompletionRequest, body).prompt == prompts


@pytest.mark.parametrize("prompt", [None, 3, [], [[]], [True], [1, "a"], {"a": 1}, ["x"] * 1000])
def test_anything_else_is_no_prompt(prompt: Any) -> None:
    assert _refused({**COMPLETION, "prompt": prompt}, CompletionRequest).param == "prompt"


@pytest.mark.parametrize(
    ("data", "at"),
    [
        (b'{"a": }', 6),
        ('{"é": }'.encode(), 7),
        (b'{"\xff": 1}', 2),
        (b"", 0),
        (b'{"a": NaN}', 6),
    ],
)
def test_invalid_json_is_refused_with_the_byte(data: bytes, at: int) -> None:
    with pytest.raises(BadRequest, match=f"at byte {at}:") as caught:
        parse_json(data)
    assert caught.value.reason == "invalid_json"


@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_a_bad_request(data: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert isinstance(parse_json(data), dict)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    body=st.dictionaries(
        st.sampled_from(
            sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "lora_request"})
        ),
        json_values,
    )
)
def test_any_object_is_a_request_or_a_bad_request(body: dict[str, Any]) -> None:
    for kind in (ChatRequest, CompletionRequest):
        try:
            parse_generation(kind, body)
        except BadRequest as error:
            assert error.param  # noqa: PT017 (not raising is right too)
