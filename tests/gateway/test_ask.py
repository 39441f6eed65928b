"""What is read from a body, what goes to the replica, and what each fault is called."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.completion.ask import Ask, parse
from gateway.errors import BadRequest


def asked(body: Any, **more: Any) -> Ask:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return parse(raw, default_max_tokens=256, **more)


def test_a_plain_body_goes_on_to_the_byte() -> None:
    raw = b'{ "model" : "m",\n "messages":[], "guided_json": {"a": 1.50}, "user":"u" }'
    ask = asked(raw)
    assert ask.body == raw
    assert (ask.model, ask.stream, ask.keep_usage) == ("m", False, False)


def test_a_stream_is_asked_for_usage_by_a_splice() -> None:
    raw = b' {"model":"m", "stream" : true,"messages":[]}'
    ask = asked(raw)
    assert ask.body == b' {"stream_options":{"include_usage":true},"model":"m"' + raw[13:]
    assert orjson.loads(ask.body)["stream_options"] == {"include_usage": True}
    assert not ask.keep_usage


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False),
        ({"include_usage": None}, False),
        ({"include_usage": True, "chunk_include_usage": False}, True),
    ],
)
def test_other_stream_options_are_kept(options: Any, keep: bool) -> None:
    ask = asked({"model": "m", "stream": True, "stream_options": options, "seed": 3})
    sent = orjson.loads(ask.body)
    assert sent["stream_options"] == {**(options or {}), "include_usage": True}
    assert sent["seed"] == 3
    assert ask.keep_usage is keep


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_known = {"model", "stream", "stream_options", "n", "best_of", "max_tokens", "prompt"}


@given(more=st.dictionaries(st.text().filter(lambda key: key not in _known), _json, max_size=4))
def test_what_the_replica_reads_is_what_the_client_said_and_usage(more: dict[str, Any]) -> None:
    more.pop("max_completion_tokens", None)
    body = {**more, "model": "m", "stream": True}
    sent = orjson.loads(asked(body).body)
    assert sent == {**body, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"forbidden","model":"mine"}',
        b'{"mod\\u0065l":"forbidden","model":"mine"}',
        b'{"model":"forbidden","stream":true,"model":"mine"}',
    ],
)
def test_a_model_named_twice_goes_on_as_the_one_that_was_checked(raw: bytes) -> None:
    ask = asked(raw)
    assert ask.model == "mine"
    assert ask.body == orjson.dumps(orjson.loads(raw)) or ask.stream
    assert b"forbidden" not in ask.body


def test_stream_said_twice_is_answered_as_it_was_understood() -> None:
    ask = asked(b'{"model":"m","stream":true,"stream":false}')
    assert not ask.stream
    assert ask.body == b'{"model":"m","stream":false}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"model": "m", "stream": "yes"}, "stream"),
        ({"model": "m", "stream": 1}, "stream"),
        ({"model": "m", "stream_options": []}, "stream_options"),
        ({"model": "m", "max_tokens": "9"}, "max_tokens"),
        ({"model": "m", "max_tokens": 1.5}, "max_tokens"),
        ({"model": "m", "max_tokens": True}, "max_tokens"),
        ({"model": "m", "max_tokens": 0}, "max_tokens"),
        ({"model": "m", "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"model": "m", "n": 0}, "n"),
        ({"model": "m", "n": 10_000}, "n"),
        ({"model": "m", "best_of": []}, "best_of"),
        ({"model": "m", "lora_request": {}}, "lora_request"),
        ({"model": "m", "lora_path": "../x"}, "lora_path"),
        ({"model": "m", "cache_salt": "x"}, "cache_salt"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        asked(body)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("raw", "at"),
    [
        (b'{"a":1,}', 6),
        (b'{"a":"\xff"}', 6),
        ('{"é":1,}'.encode(), 7),
        (b"", 0),
        (b'{"model":"a"} x', 14),
    ],
)
def test_text_that_is_not_json_is_told_with_the_byte(raw: bytes, at: int) -> None:
    with pytest.raises(BadRequest, match=f"not valid JSON.*at byte {at}\\."):
        asked(raw)


@pytest.mark.parametrize("raw", [b"[]", b"3", b'"x"', b"null", b"true"])
def test_json_that_is_no_object_is_told_so(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="must be a JSON object"):
        asked(raw)


@given(raw=st.binary(max_size=60))
def test_any_bytes_are_answered_and_never_break(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        asked(raw)


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ({}, 256),
        ({"max_tokens": None}, 256),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 10, "max_completion_tokens": 20}, 20),
        ({"max_tokens": 10, "n": 3}, 30),
        ({"max_tokens": 10, "n": 2, "best_of": 4}, 40),
        ({"n": 2}, 512),
    ],
)
def test_output_is_estimated_at_its_most(more: dict[str, Any], tokens: int) -> None:
    assert asked({"model": "m", **more}).output_tokens == tokens


def test_token_ids_count_themselves_and_text_by_its_size() -> None:
    assert asked({"model": "m", "prompt": list(range(100))}).input_tokens == 100
    assert asked({"model": "m", "prompt": [[1, 2], [3]]}).input_tokens == 3
    assert 250 <= asked({"model": "m", "prompt": "x" * 1000}).input_tokens <= 260
