"""What the official SDK depends on in a stream: events, comments, usage, the end of it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from scripted import BASE, DONE, USAGE, WORDS, ScriptedReplica, chunk, chunks, event, usage_event

ASK: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
ASKS_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
TEXT = "".join(WORDS)


def replica(**more: Any) -> ScriptedReplica:
    return ScriptedReplica("replica-0", adapters=("shout",), **more)


def says(one: ScriptedReplica, *parts: bytes, pause_s: float = 0.0) -> None:
    """The replica sends these writes, whatever is asked."""

    async def answer(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(pause_s)
        return response

    one.answer = answer


async def test_events_pass_as_they_came_and_end_in_done(fleet) -> None:
    odd = event({**chunk(BASE, {"content": "é\u2028"}), "x_ours": 1e-7, "big": 2**70 % 10**18})
    wire = chunks(BASE)[0] + b"event: message\n" + odd + chunks(BASE)[-1]
    one = replica()
    says(one, wire[:50], wire[50:51], wire[51:] + DONE)
    async with fleet(one) as it:
        answer = await it.chat(stream=True)
        assert answer.content == wire + DONE
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert "content-encoding" not in answer.headers
        assert b"\nid:" not in answer.content
        assert b"\nretry:" not in answer.content


async def test_the_sdk_reads_the_text_the_roles_and_the_reasons(fleet) -> None:
    async with fleet(replica()) as it, it.sdk() as sdk:
        seen = [part async for part in await sdk.chat.completions.create(**ASK, stream=True)]
        assert seen[0].choices[0].delta.role == "assistant"
        assert "".join(part.choices[0].delta.content or "" for part in seen) == TEXT
        assert [part.choices[0].finish_reason for part in seen] == [None] * 5 + ["stop"]
        assert len({(part.id, part.created, part.model) for part in seen}) == 1
        async with sdk.chat.completions.stream(**ASK) as events:  # the SDK's own accumulator
            final = await events.get_final_completion()
        assert final.choices[0].message.content == TEXT


async def test_several_choices_keep_their_index(fleet) -> None:
    parts = [event(chunk(BASE, {"content": word})) for word in "ab"]
    parts[1] = parts[1].replace(b'"index":0', b'"index":1')
    one = replica()
    says(one, *parts, DONE)
    async with fleet(one) as it, it.sdk() as sdk:
        stream = await sdk.chat.completions.create(**ASK, stream=True, n=2)
        assert [(p.choices[0].index, p.choices[0].delta.content) async for p in stream] == [
            *((0, "a"), (1, "b"))
        ]
        assert one.received[0][1]["n"] == 2


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_is_always_asked_for_and_told_only_to_who_asked(fleet, options) -> None:
    one = replica()
    more = {} if options is None else {"stream_options": {**options, "x_engine": [1]}}
    async with fleet(one) as it:
        answer = await it.chat(stream=True, **more)
        asked = bool(options and options.get("include_usage"))
        assert (usage_event(BASE) in answer.content) is asked
        assert answer.content == b"".join(
            [*chunks(BASE), *([usage_event(BASE)] if asked else []), DONE]
        )
        sent = one.received[0][1]["stream_options"]
        assert sent["include_usage"] is True
        assert sent.get("x_engine") == (None if options is None else [1])


async def test_usage_goes_through_whole_and_the_last_of_a_running_count_counts(fleet) -> None:
    zero = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    details = {**USAGE, "completion_tokens_details": {"reasoning_tokens": 0}}
    one = replica()
    running = [
        event({**chunk(BASE, {"content": "a"}), "usage": {**zero, "completion_tokens": n}})
        for n in (1, 2)
    ]
    last = event({**chunk(BASE, {}), "choices": [], "usage": details})
    says(one, *running, last, DONE)
    async with fleet(one) as it, it.sdk() as sdk:
        stream = await sdk.chat.completions.create(**ASK, stream=True, **ASKS_USAGE)
        *_, told = [part async for part in stream]
        assert told.usage is not None
        assert told.choices == []
        assert told.usage.prompt_tokens_details.cached_tokens == 2
        assert told.usage.completion_tokens_details.reasoning_tokens == 0
        (row,) = await it.usage()
        assert (row["prompt_tokens"], row["completion_tokens"], row["estimated"]) == (7, 4, 0)
        says(one, *chunks(BASE), event({**chunk(BASE, {}), "choices": [], "usage": zero}), DONE)
        await it.chat(stream=True)
        (row,) = await it.usage()  # nothing was used, said the replica: that is a fact
        assert (row["prompt_tokens"], row["completion_tokens"], row["estimated"]) == (7, 4, 0)


async def test_comments_keep_a_silent_stream_awake_and_the_sdk_does_not_mind(fleet) -> None:
    one = replica()
    says(one, *chunks(BASE), DONE, pause_s=0.25)
    async with fleet(one, forward={"keepalive_s": 0.1}) as it, it.sdk() as sdk:
        raw = asyncio.ensure_future(it.chat(stream=True))
        stream = await sdk.chat.completions.create(**ASK, stream=True)
        assert "".join([p.choices[0].delta.content or "" async for p in stream]) == TEXT
        text = (await raw).text
        assert text.count(": keep-alive\n\n") >= 5
        assert text.replace(": keep-alive\n\n", "").encode() == b"".join(chunks(BASE)) + DONE


async def test_a_failure_after_the_comments_is_told_inside_the_stream(fleet) -> None:
    async def refuses(request: Any, body: Any) -> Any:
        await asyncio.sleep(0.3)
        error = {"message": "too long", "type": "invalid_request_error"}
        return web.json_response({"error": {**error, "param": None, "code": "x"}}, status=400)

    one = replica()
    one.answer = refuses
    async with fleet(one, forward={"keepalive_s": 0.1}) as it, it.sdk() as sdk:
        stream = await sdk.chat.completions.create(**ASK, stream=True)
        with pytest.raises(openai.APIError, match="too long"):
            [part async for part in stream]
        with pytest.raises(openai.BadRequestError):  # and before any comment as a status
            await sdk.chat.completions.create(**ASK)


async def test_legacy_completions_stream_too(fleet) -> None:
    text = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": BASE}
    choice = {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop"}
    one = replica()
    says(one, event({**text, "choices": [choice]}), DONE)
    async with fleet(one) as it, it.sdk() as sdk:
        for prompt in ("x", ["x", "y"], [1, 2, 3], [[1], [2]]):
            stream = await sdk.completions.create(model=BASE, prompt=prompt, stream=True)
            assert [part.choices[0].text async for part in stream] == ["Hi"]
            assert one.received[-1][1]["prompt"] == prompt
        assert one.received[-1][0].path == "/v1/completions"


async def test_a_client_that_closes_after_done_was_served(fleet) -> None:
    """The SDK closes at once on [DONE]; the replica's own end may come much later, or never."""

    async def lingers(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        await response.write(b"".join(chunks(BASE)) + usage_event(BASE) + DONE)
        await asyncio.sleep(0.5)
        return response

    one = replica()
    one.answer = lingers
    async with fleet(one) as it, it.sdk() as sdk:
        began = asyncio.get_running_loop().time()
        for _ in range(2):
            async with await sdk.chat.completions.create(**ASK, stream=True) as stream:
                assert len([part async for part in stream]) == len(WORDS) + 2
        assert asyncio.get_running_loop().time() - began < 0.9
        (row,) = await it.usage()
        assert (row["ok"], row["cut"], row["completion_tokens"]) == (2, 0, 8)


async def test_json_of_a_plain_reply_is_the_replicas_to_the_byte(fleet) -> None:
    async def odd(request: Any, body: Any) -> Any:
        return web.Response(body=wire, content_type="application/json")

    wire = orjson.dumps({"x": 1e-7, "usage": USAGE, "choices": [], "model": BASE}) + b"\n "
    one = replica()
    one.answer = odd
    async with fleet(one) as it:
        assert (await it.chat()).content == wire
