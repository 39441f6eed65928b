"""Chat and completions as the official SDK sees them, and what the wire says."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest

PROMPT: list[Any] = [{"role": "user", "content": "Say something."}]


async def test_chat_answers_in_openai_shape(serve: Any) -> None:
    served = await serve()
    reply = await served.sdk.chat.completions.create(model="ada", messages=PROMPT, max_tokens=5)
    assert reply.model == "ada"
    assert reply.object == "chat.completion"
    assert reply.system_fingerprint.startswith("tiny+")
    [choice] = reply.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("length", "stop")
    assert reply.usage.completion_tokens <= 5
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


async def test_base_and_adapters_say_different_things(serve: Any) -> None:
    served = await serve()
    texts = [await served.tokens(model) for model in ("tiny", "ada", "bob", "cyd")]
    assert len(set(texts)) == 4


async def test_a_stream_joins_to_the_text_that_is_not_streamed(serve: Any) -> None:
    served = await serve()
    asks = {"messages": PROMPT, "max_tokens": 20, "temperature": 0}
    for model in ("tiny", "bob"):
        whole = await served.sdk.chat.completions.create(model=model, **asks)
        stream = await served.sdk.chat.completions.create(
            model=model, stream=True, stream_options={"include_usage": True}, **asks
        )
        chunks = [chunk async for chunk in stream]
        *body, last = chunks
        assert "".join(c.choices[0].delta.content or "" for c in body) == (
            whole.choices[0].message.content
        )
        assert body[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in body[:-1]] == [None] * (len(body) - 1)
        assert body[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        assert last.choices == []
        assert last.usage.total_tokens == whole.usage.total_tokens
        known = (whole.usage.prompt_tokens - 1) // 16 * 16  # whole pages, never the last token
        assert last.usage.prompt_tokens_details.cached_tokens == known
        assert all(c.usage is None for c in body)
        for field in ("id", "created", "model", "system_fingerprint"):
            assert len({getattr(c, field) for c in chunks}) == 1
        assert last.system_fingerprint == whole.system_fingerprint


async def test_no_usage_chunk_unless_asked(serve: Any) -> None:
    served = await serve()
    stream = await served.sdk.completions.create(
        model="tiny", prompt="a", max_tokens=3, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


async def test_usage_comes_with_every_chunk_when_asked_for(serve: Any) -> None:
    served = await serve()
    stream = await served.sdk.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        extra_body={"ignore_eos": True},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_the_wire_of_a_stream(serve: Any) -> None:
    served = await serve()
    body = {"model": "ada", "messages": PROMPT, "max_tokens": 4, "stream": True}
    headers = {"x-request-id": "mine"}
    url = served.url + "/v1/chat/completions"
    async with served.http.post(url, json=body, headers=headers) as reply:
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache"
        assert reply.headers["x-accel-buffering"] == "no"
        assert reply.headers["x-request-id"] == "mine"
        state = await served.adapter("ada")
        assert reply.headers["x-loraplex-adapter-version"] == state["digest"]
        raw = await reply.read()
    assert raw.endswith(b"\n\ndata: [DONE]\n\n")
    events = raw.split(b"\n\n")[:-2]
    assert all(event.startswith(b"data: {") for event in events)
    first = orjson.loads(events[0].removeprefix(b"data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert orjson.loads(events[-1].removeprefix(b"data: "))["choices"][0]["delta"] == {}


async def test_several_choices_and_prompts_keep_their_index(serve: Any) -> None:
    served = await serve()
    prompts = ["once upon", "a time", "there"]
    alone = [await served.tokens("ada", prompt) for prompt in prompts]
    reply = await served.sdk.completions.create(
        model="ada", prompt=prompts, max_tokens=12, temperature=0, n=2
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in reply.choices] == [t for text in alone for t in (text, text)]
    stream = await served.sdk.completions.create(
        model="ada", prompt=prompts, max_tokens=12, temperature=0, n=2, stream=True
    )
    texts = [""] * 6
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


async def test_a_prompt_is_billed_once_however_many_choices(serve: Any) -> None:
    served = await serve()
    one = await served.sdk.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=2)
    many = await served.sdk.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=2, n=3)
    assert one.usage.prompt_tokens == many.usage.prompt_tokens == 3


async def test_token_ids_are_the_prompt_as_it_is(serve: Any) -> None:
    served = await serve()
    tokens = list(served.replica._vocabulary.encode("once", special=True))
    assert await served.tokens("tiny", tokens) == await served.tokens("tiny", "once")
    status, reply = await served.post(
        "/v1/completions", {"model": "tiny", "prompt": [1, 1_000_000]}
    )
    assert (status, reply["error"]["param"]) == (400, "prompt")


async def test_a_seed_reproduces_and_without_one_texts_differ(serve: Any) -> None:
    served = await serve()
    asks: dict[str, Any] = {"temperature": 1.5, "tokens": 30}
    seeded = [await served.tokens("tiny", seed=7, **asks) for _ in range(3)]
    assert len(set(seeded)) == 1
    assert await served.tokens("tiny", seed=8, **asks) != seeded[0]
    free = [await served.tokens("tiny", **asks) for _ in range(4)]
    assert len(set(free)) == 4
    choices = await served.sdk.completions.create(
        model="tiny", prompt="once", max_tokens=30, temperature=1.5, seed=7, n=2
    )
    assert choices.choices[0].text == seeded[0] != choices.choices[1].text


async def test_a_stop_string_is_left_out_and_ends_the_count(serve: Any) -> None:
    served = await serve()
    whole = await served.tokens("tiny", tokens=24, ignore_eos=True)
    stop = whole[8:11]
    at = whole.index(stop)
    for stream in (False, True):
        reply = await served.sdk.completions.create(
            model="tiny",
            prompt="once",
            max_tokens=24,
            temperature=0,
            stop=[stop, "never said"],
            stream=stream,
            extra_body={"ignore_eos": True},
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )
        if stream:
            chunks = [chunk async for chunk in reply]
            text = "".join(c.choices[0].text for c in chunks[:-1])
            finish, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
        else:
            text, finish, usage = reply.choices[0].text, reply.choices[0].finish_reason, reply.usage
        assert text == whole[:at]
        assert finish == "stop"
        assert usage.completion_tokens < 24
    await served.idle()


async def test_a_stop_token_is_counted_and_not_shown(serve: Any) -> None:
    served = await serve()
    for prompt in "abcdefgh":
        first = await served.tokens("tiny", prompt, tokens=1)
        if first:  # not a piece of a character
            break
    [token] = served.replica._vocabulary.encode(first, special=False)
    reply = await served.sdk.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=8,
        temperature=0,
        extra_body={"stop_token_ids": [token]},
    )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == ""
    assert reply.usage.completion_tokens == 1


async def test_without_a_limit_the_context_is_the_limit(serve: Any) -> None:
    served = await serve(max_model_len=40)
    reply = await served.sdk.completions.create(
        model="tiny", prompt=[5] * 30, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.usage.total_tokens == 40
    assert reply.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [([5] * 40, None, "prompt"), ([5] * 30, 11, "max_tokens"), ([5] * 100, 1, "prompt")],
)
async def test_what_does_not_fit_the_context_is_refused_by_its_name(
    serve: Any, prompt: list[int], max_tokens: int | None, param: str
) -> None:
    served = await serve(max_model_len=40)
    with pytest.raises(openai.BadRequestError) as caught:
        await served.sdk.completions.create(model="tiny", prompt=prompt, max_tokens=max_tokens)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == param
    assert "40 tokens" in caught.value.message


async def test_errors_are_the_sdk_classes_they_should_be(serve: Any) -> None:
    served = await serve(choices_max=4)
    create = served.sdk.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        await create(model="nobody", messages=PROMPT)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await create(model="nobody", messages=PROMPT, stream=True)
    with pytest.raises(openai.BadRequestError) as hot:
        await create(model="tiny", messages=PROMPT, temperature=3)
    assert hot.value.param == "temperature"
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
    with pytest.raises(openai.BadRequestError) as tools:
        await create(model="tiny", messages=PROMPT, tools=[tool])
    assert (tools.value.code, tools.value.param) == ("unsupported", "tools")
    with pytest.raises(openai.BadRequestError) as lora:
        await create(model="tiny", messages=PROMPT, extra_body={"lora_request": {"id": 1}})
    assert lora.value.param == "lora_request"
    with pytest.raises(openai.BadRequestError) as many:
        await create(model="tiny", messages=PROMPT, n=5)
    assert many.value.param == "n"
    with pytest.raises(openai.BadRequestError) as empty:
        await served.sdk.completions.create(model="tiny", prompt="")
    assert empty.value.param == "prompt"


async def test_a_full_waiting_line_is_a_503_that_says_when_to_come_back(serve: Any) -> None:
    served = await serve(max_running=1, max_waiting=1)
    tasks = [
        asyncio.ensure_future(served.tokens("tiny", tokens=400, ignore_eos=True)) for _ in range(2)
    ]
    front = served.replica.front
    await served.until(lambda: front.report.running + front.report.waiting == 2)
    with pytest.raises(openai.InternalServerError) as full:
        await served.sdk.completions.create(model="tiny", prompt="x")
    assert full.value.status_code == 503
    assert full.value.code == "server_overloaded"
    assert full.value.response.headers["retry-after"] == "1"
    await asyncio.gather(*tasks)


async def test_models_list_what_can_be_named(serve: Any) -> None:
    served = await serve()
    models = [model async for model in await served.sdk.models.list()]
    assert [model.id for model in models] == ["tiny", "ada", "bob", "cyd", "dee", "eve", "fay"]
    parents = {model.id: model.model_extra["parent"] for model in models}
    assert parents["tiny"] is None
    assert parents["ada"] == "tiny"
    assert (await served.sdk.models.retrieve("ada")).id == "ada"
    with pytest.raises(openai.NotFoundError):
        await served.sdk.models.retrieve("nobody")


async def test_a_chat_template_gets_its_arguments(serve: Any) -> None:
    served = await serve()
    status, reply = await served.post(
        "/v1/chat/completions",
        {"model": "tiny", "messages": PROMPT, "chat_template_kwargs": {"messages": []}},
    )
    assert (status, reply["error"]["param"]) == (400, "chat_template_kwargs")
