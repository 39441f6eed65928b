"""JSON by a schema: what comes parses, what cannot be enforced is refused by its field."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.engine.model_config import ModelConfig
from replica.errors import BadRequest
from replica.grammar import SCHEMA_BYTES_MAX, Grammars
from replica.text import Vocabulary

PROMPT: list[Any] = [{"role": "user", "content": "Say something."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "good": {"type": "boolean"},
    },
    "required": ["name", "kind", "legs", "good"],
    "additionalProperties": False,
}


def _format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


def _is_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "kind", "legs", "good"]
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 8
    assert person["kind"] in ("cat", "dog")
    assert type(person["legs"]) is int
    assert 0 <= person["legs"] <= 9
    assert type(person["good"]) is bool


@pytest.fixture(scope="module")
def base(tiny: Path) -> tuple[Grammars, Vocabulary, ModelConfig]:
    config = ModelConfig.from_dir(tiny / "base")
    ends = config.eos_token_ids
    grammars = Grammars(tiny / "base", vocab_size=config.vocab_size, ends=ends)
    return grammars, Vocabulary(tiny / "base"), config


async def test_replies_are_documents_of_their_schema_however_hot(serve: Any) -> None:
    served = await serve()
    asks: dict[str, Any] = {"messages": PROMPT, "max_tokens": 400, "temperature": 1.5, "n": 4}
    for model, seed in (("tiny", 1), ("ada", 2)):
        for field in (
            {"response_format": _format(PERSON)},
            {"extra_body": {"guided_json": PERSON}},
        ):
            reply = await served.sdk.chat.completions.create(
                model=model, seed=seed, **asks, **field
            )
            for choice in reply.choices:
                assert choice.finish_reason == "stop"
                _is_person(choice.message.content)
    await served.idle()


async def test_a_streamed_document_is_the_one_that_is_not_streamed(serve: Any) -> None:
    served = await serve()
    asks: dict[str, Any] = {"model": "bob", "messages": PROMPT, "max_tokens": 400, "seed": 3}
    asks["response_format"] = _format(PERSON)
    whole = await served.sdk.chat.completions.create(**asks)
    stream = await served.sdk.chat.completions.create(stream=True, **asks)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    _is_person(text)


async def test_any_object_begins_as_one_and_parses_if_it_ends(serve: Any) -> None:
    served = await serve()
    asks: dict[str, Any] = {"prompt": "once", "max_tokens": 60, "temperature": 1.0, "seed": 9}
    reply = await served.sdk.completions.create(
        model="tiny", n=8, extra_body={"response_format": {"type": "json_object"}}, **asks
    )
    for choice in reply.choices:
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)
    closing = await served.sdk.completions.create(
        model="tiny",
        extra_body={"guided_json": json.dumps({"type": "object"})},
        logit_bias={str(served.replica._vocabulary.encode("}", special=False)[0]): 100},
        **asks,
    )
    assert closing.choices[0].text == "{}"


async def test_documents_survive_preemption_and_neighbours_do_not_notice(serve: Any) -> None:
    calm = await serve()
    expected = await calm.tokens("ada", tokens=60, ignore_eos=True)
    served = await serve(pages=24, max_model_len=320, max_running=8)
    person = {"prompt": "x" * 60, "guided_json": PERSON, "temperature": 1.2, "tokens": 200}
    texts = await asyncio.gather(
        *[served.tokens("tiny", seed=seed, **person) for seed in range(6)],
        served.tokens("ada", tokens=60, ignore_eos=True),
    )
    for text in texts[:-1]:
        _is_person(text)
    assert texts[-1] == expected
    await served.idle()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nothing"},
        {"$ref": "#/missing"},
        {"type": "array", "uniqueItems": True},
        {"type": "string", "pattern": "("},
        {"not": {"type": "string"}},
        {"enum": []},
        {"description": "x" * SCHEMA_BYTES_MAX},
    ],
    ids=str,
)
async def test_a_schema_that_cannot_be_enforced_is_refused(
    serve: Any, schema: dict[str, Any]
) -> None:
    served = await serve()
    with pytest.raises(openai.BadRequestError) as caught:
        await served.sdk.chat.completions.create(
            model="tiny", messages=PROMPT, response_format=_format(schema)
        )
    assert caught.value.param == "response_format"
    await served.idle()


@settings(max_examples=30)
@given(st.data())
def test_what_is_allowed_depends_on_what_was_drawn_and_nothing_else(
    base: tuple[Grammars, Vocabulary, ModelConfig], data: st.DataObject
) -> None:
    grammars, vocabulary, config = base
    first = grammars.compile(PERSON, param="response_format")
    drawn: tuple[int, ...] = ()
    masks: list[bytes] = []
    while not (drawn and drawn[-1] in config.eos_token_ids):
        mask = first.allowed(drawn)
        assert mask is not None
        masks.append(mask)
        allowed = [t for t in range(config.vocab_size) if mask[t // 8] >> t % 8 & 1]
        assert allowed
        drawn += (data.draw(st.sampled_from(allowed)),)
    _is_person(vocabulary.decode(drawn[:-1]))
    again = first.copy()
    order = data.draw(st.permutations(range(len(masks))))
    assert [again.allowed(drawn[:at]) for at in order] == [masks[at] for at in order]


def test_after_a_token_that_was_not_allowed_there_is_no_telling(
    base: tuple[Grammars, Vocabulary, ModelConfig],
) -> None:
    grammars, vocabulary, _ = base
    grammar = grammars.compile(PERSON, param="response_format")
    wrong = vocabulary.encode("}", special=False)
    assert grammar.allowed(wrong) is None
    assert grammar.allowed(()) is None


def test_the_field_of_a_bad_schema_is_named(
    base: tuple[Grammars, Vocabulary, ModelConfig],
) -> None:
    with pytest.raises(BadRequest) as caught:
        base[0].compile({"type": "nothing"}, param="guided_json")
    assert (caught.value.param, caught.value.reason) == ("guided_json", "invalid_json_schema")
