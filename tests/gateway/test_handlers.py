"""A completion from key to bill, through real sockets, a real store and the official SDK."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import orjson
import pytest
from scripted import (
    BASE,
    DONE,
    WORDS,
    Fleet,
    ScriptedReplica,
    chunks,
    read_reply,
    until,
    usage_event,
)

from gateway.state.tenants import Limits

TEXT = "".join(WORDS)
ASK = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


def replica(name: str = "replica-0", **more: Any) -> ScriptedReplica:
    return ScriptedReplica(name, adapters=("shout", "org/pirate:v2"), **more)


async def one_row(it: Fleet) -> dict[str, Any]:
    (row,) = await it.usage()
    return row


# Answers ----------------------------------------------------------------------------------------


async def test_a_plain_answer_reaches_the_sdk_and_the_ledger(fleet) -> None:
    async with fleet(replica()) as it, it.sdk() as sdk:
        answer = await sdk.chat.completions.create(**{**ASK, "model": "shout"})
        assert answer.choices[0].message.content == TEXT
        assert answer.model == "shout"
        assert answer._request_id.startswith("req_")
        assert answer.usage.prompt_tokens == 7
        row = await one_row(it)
        assert (row["tenant"], row["adapter"]) == ("acme", "shout")
        assert (row["prompt_tokens"], row["completion_tokens"], row["cached_tokens"]) == (7, 4, 2)
        assert (row["ok"], row["estimated"]) == (1, 0)


async def test_the_body_and_its_length_are_untouched(fleet) -> None:
    one = replica()
    async with fleet(one) as it:
        answer = await it.chat("shout", guided_json={"a": 1}, user="u")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("application/json")
        assert int(answer.headers["content-length"]) == len(answer.content)
        direct = await it.http.post(f"{one.url}/v1/chat/completions", json={"model": "shout"})
        assert answer.content == direct.content
        assert one.received[0][1] == {**ASK, "model": "shout", "guided_json": {"a": 1}, "user": "u"}


async def test_a_reply_says_who_served_it_and_why(fleet) -> None:
    async with fleet(replica()) as it:
        headers = (await it.chat("shout")).headers
        assert headers["x-loraplex-replica"] == "replica-0"
        assert headers["x-loraplex-placement"] in ("home", "warm", "spill", "cold")
        assert float(headers["x-loraplex-queue-ms"]) >= 0
        assert headers["x-loraplex-adapter-version"] == "sha-shout"
        assert re.fullmatch(r"req_[0-9a-f]{32}", headers["x-request-id"])
        assert "x-loraplex-adapter-version" not in (await it.chat(BASE)).headers


@pytest.mark.parametrize("asked", [True, False, None])
async def test_the_usage_event_comes_exactly_when_it_was_asked_for(fleet, asked) -> None:
    one = replica()
    more = {} if asked is None else {"stream_options": {"include_usage": asked}}
    async with fleet(one) as it, it.sdk() as sdk:
        stream = await sdk.chat.completions.create(**ASK, stream=True, **more)
        seen = [part async for part in stream]
        usages = [part.usage for part in seen if part.usage is not None]
        assert [usage.total_tokens for usage in usages] == ([11] if asked else [])
        assert all(part.choices for part in seen if part.usage is None)
        said = [part.choices[0].delta.content for part in seen if part.choices]
        assert "".join(word or "" for word in said) == TEXT
        assert one.received[0][1]["stream_options"] == {"include_usage": True}
        row = await one_row(it)
        assert (row["prompt_tokens"], row["completion_tokens"], row["ok"]) == (7, 4, 1)


async def test_completions_are_served_as_chat_is(fleet) -> None:
    one = replica()
    async with fleet(one) as it:
        answer = await it.http.post("/v1/completions", json={"model": BASE, "prompt": "x"})
        assert answer.status_code == 200
        assert one.received[0][0].path == "/v1/completions"


async def test_a_stream_split_at_every_byte_reaches_the_client_identical(fleet) -> None:
    wire = b"".join(chunks("shout", ("Hé", "{}"))) + usage_event("shout") + DONE

    async def byte_by_byte(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        cut = int(body["user"])
        await response.write(wire[:cut])
        await asyncio.sleep(0.001)
        await response.write(wire[cut:])
        return response

    one = replica()
    one.answer = byte_by_byte
    async with fleet(one) as it:

        async def cuts(first: int) -> None:
            host, port = it.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for cut in range(first, len(wire), 8):
                options = {"stream": True, "stream_options": {"include_usage": True}}
                body = orjson.dumps({"model": "shout", "user": str(cut), **options})
                writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                    b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
                    % (it.key.encode(), len(body), body)
                )
                _, _, parts = await read_reply(reader)
                assert b"".join(parts) == wire, f"cut at byte {cut}"
            writer.close()

        await asyncio.gather(*[cuts(first) for first in range(1, 9)])


async def test_headers_of_a_stream_forbid_buffering(fleet) -> None:
    async with fleet(replica()) as it:
        answer = await it.chat(BASE, stream=True)
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-loraplex-replica"] == "replica-0"


async def test_the_replica_never_sees_a_tenants_key_or_headers(fleet) -> None:
    one = replica()
    async with fleet(one, fleet={"token": "secret"}) as it:
        sent = {"cookie": "a=b", "x-loraplex-fleet-token": "forged", "traceparent": "00-1-2-03"}
        await it.http.post("/v1/chat/completions", json=ASK, headers=sent)
        headers = one.received[0][0].headers
        assert "authorization" not in headers
        assert "cookie" not in headers
        assert headers["x-loraplex-fleet-token"] == "secret"
        assert headers["traceparent"] == "00-1-2-03"
        assert headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("shares", [False, True])
async def test_a_tenant_shares_cached_prompts_with_itself_unless_all_share(
    fleet, shares: bool
) -> None:
    one = replica()
    async with fleet(one, forward={"share_prefixes": shares}) as it:
        forged = {"x-loraplex-cache-salt": "globex"}
        await it.http.post("/v1/chat/completions", json=ASK, headers=forged)
        salts = one.received[0][0].headers.getall("x-loraplex-cache-salt", [])
        assert salts == ([] if shares else ["acme"])


# Refusals ---------------------------------------------------------------------------------------


async def test_a_wrong_key_and_no_key_are_the_same_401(fleet) -> None:
    async with fleet(replica()) as it, it.sdk("lp-wrong") as sdk:
        with pytest.raises(openai.AuthenticationError) as caught:
            await sdk.chat.completions.create(**ASK)
        assert caught.value.code == "invalid_api_key"
        bodies = set()
        for value in ("", "Bearer", "Bearer lp-wrong", "Basic x", "Bearer \xff\xfe"):
            answer = await it.http.post(
                "/v1/chat/completions", json=ASK, headers={"authorization": value.encode("latin1")}
            )
            assert answer.status_code == 401
            assert answer.headers["x-request-id"]
            bodies.add(answer.content)
        assert len(bodies) == 1


async def test_a_key_may_come_as_azure_sends_it(fleet) -> None:
    async with fleet(replica()) as it:
        del it.http.headers["authorization"]
        it.http.headers["api-key"] = it.key
        assert (await it.chat()).status_code == 200


async def test_unknown_and_forbidden_are_the_same_404(fleet) -> None:
    async with fleet(replica(), models=(BASE,)) as it, it.sdk() as sdk:
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.chat.completions.create(**{**ASK, "model": "shout"})
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        forbidden, unknown = await it.chat("shout"), await it.chat("shouu")
        assert forbidden.status_code == unknown.status_code == 404
        assert forbidden.content.replace(b"shout", b"shouu") == unknown.content
        drop = ("x-request-id", "date")
        assert {k: v for k, v in forbidden.headers.items() if k not in drop} == {
            k: v for k, v in unknown.headers.items() if k not in drop
        }


@pytest.mark.parametrize(
    ("body", "status", "says", "param"),
    [
        (b'{"model": "tiny",}', 400, "at byte 16", None),
        (b"[1]", 400, "JSON object", None),
        (b'{"messages":[]}', 400, "model", "model"),
        (b'{"model":7}', 400, "`model`", "model"),
        (b'{"model":"tiny","stream":"x"}', 400, "`stream`", "stream"),
        (b'{"model":"tiny","max_tokens":"x"}', 400, "`max_tokens`", "max_tokens"),
        (b"x" * 3000, 413, "2048 bytes", None),
        (b"\xff\xfe", 400, "not valid JSON", None),
    ],
)
async def test_a_bad_body_is_told_what_is_wrong(fleet, body, status, says, param) -> None:
    async with fleet(replica(), listen={"body_max_bytes": 2048}) as it:
        answer = await it.http.post("/v1/chat/completions", content=body)
        error = answer.json()["error"]
        assert answer.status_code == status
        assert says in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert (await it.chat()).status_code == 200


async def test_a_body_that_grows_over_the_limit_is_refused_too(fleet) -> None:
    async def grows() -> Any:
        for _ in range(100):
            yield b" " * 1000

    async with fleet(replica(), listen={"body_max_bytes": 2048}) as it:
        answer = await it.http.post("/v1/chat/completions", content=grows())
        assert answer.status_code == 413
        bomb = gzip.compress(b" " * 10_000_000)
        headers = {"content-encoding": "gzip"}
        answer = await it.http.post("/v1/chat/completions", content=bomb[:2000], headers=headers)
        assert answer.status_code in (400, 413)


async def test_a_compressed_body_is_read(fleet) -> None:
    one = replica()
    async with fleet(one) as it:
        packed = gzip.compress(orjson.dumps(ASK))
        headers = {"content-encoding": "gzip"}
        answer = await it.http.post("/v1/chat/completions", content=packed, headers=headers)
        assert answer.status_code == 200
        assert one.received[0][1] == ASK
        answer = await it.http.post("/v1/chat/completions", content=b"no gzip", headers=headers)
        assert answer.status_code == 400
        assert "error" in answer.json()


async def test_bad_requests_are_the_sdks_bad_request(fleet) -> None:
    async with fleet(replica()) as it, it.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(**ASK, extra_body={"lora_path": "/etc"})
        assert caught.value.param == "lora_path"


# Quotas -----------------------------------------------------------------------------------------


async def test_a_spent_limit_is_a_rate_limit_error_with_a_true_wait(fleet) -> None:
    one = replica()
    limits = Limits(requests_per_min=2, tokens_per_min=100_000)
    async with fleet(one, limits=limits) as it, it.sdk() as sdk:
        first = await it.chat()
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-limit-tokens"] == "100000"
        assert (await it.chat(stream=True)).headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(**ASK)
        headers = caught.value.response.headers
        assert caught.value.code == "rate_limit_exceeded"
        assert 0 < float(headers["retry-after-ms"]) <= 30_000
        assert 1 <= int(headers["retry-after"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert headers["x-request-id"]
        assert len(one.received) == 2
        row = await one_row(it)
        assert (row["requests"], row["ok"], row["refused"]) == (3, 2, 1)


async def test_a_limit_of_nothing_tells_the_client_not_to_retry(fleet) -> None:
    async with fleet(replica(), limits=Limits(requests_per_min=0)) as it:
        answer = await it.chat()
        assert answer.status_code == 429
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers


async def test_what_was_reserved_is_settled_by_what_was_used(fleet) -> None:
    limits = Limits(tokens_per_min=1000)
    async with fleet(replica(), limits=limits) as it:
        tenant = it.gateway.registry.tenant("acme")
        for _ in range(5):  # each reserves 800 of 1000, and uses 11
            answer = await it.chat(max_tokens=780)
            assert answer.status_code == 200
            quota = it.gateway.quota
            for _ in range(100):
                if (await quota.peek(tenant))[0].remaining > 900:
                    break
                await asyncio.sleep(0.01)


async def test_a_refused_request_gives_its_tokens_back(fleet) -> None:
    async def busy(request: Any, body: Any) -> Any:
        raise AssertionError("never reached")

    one = replica()
    one.answer = busy
    async with fleet(one, limits=Limits(tokens_per_min=1000)) as it:
        await one.stop()
        answer = await it.chat(max_tokens=700)
        assert answer.status_code in (502, 503)
        tenant = it.gateway.registry.tenant("acme")

        async def remaining() -> int:
            return (await it.gateway.quota.peek(tenant))[0].remaining

        for _ in range(100):
            if await remaining() >= 990:
                break
            await asyncio.sleep(0.01)
        assert await remaining() >= 990


# Queue ------------------------------------------------------------------------------------------


@asynccontextmanager
async def full(it: Fleet, one: ScriptedReplica) -> AsyncIterator[None]:
    """Every place at the one replica is taken, until the block ends."""
    one.speak.clear()
    places = one.capacity + 1  # the dispatcher keeps one ready behind those that run
    running = [asyncio.ensure_future(it.chat(stream=True)) for _ in range(places)]
    await until(lambda: it.gateway.pump.dispatcher.in_flight == places)
    yield
    one.speak.set()
    answers = await asyncio.gather(*running)
    assert [answer.status_code for answer in answers] == [200] * places


async def test_a_full_line_is_a_429_and_a_long_wait_a_503(fleet) -> None:
    one = replica(capacity=1)
    queue = {"per_tenant_max": 1, "ttl_s": 0.3}
    async with fleet(one, queue=queue) as it, full(it, one):
        queued = asyncio.ensure_future(it.chat())
        await until(lambda: it.gateway.pump.dispatcher.queued == 1)
        third = await it.chat()
        assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert third.headers["retry-after"] == "1"
        late = await queued
        assert (late.status_code, late.json()["error"]["code"]) == (503, "server_overloaded")
        assert late.headers["retry-after"] == "1"
        assert (await one_row(it))["refused"] == 2


async def test_a_queued_stream_is_kept_awake_and_then_told_inside(fleet) -> None:
    one = replica(capacity=1)
    soon = {"queue": {"ttl_s": 0.5}, "forward": {"keepalive_s": 0.1}}
    async with fleet(one, **soon) as it, full(it, one):
        late = await it.chat(stream=True)
        assert late.status_code == 200
        assert late.text.count(": keep-alive\n\n") >= 3
        last = late.text.rstrip().rsplit("\n\n", 1)[1]
        assert orjson.loads(last.removeprefix("data: "))["error"]["code"] == "server_overloaded"
        assert "[DONE]" not in late.text


async def test_the_sdk_reads_a_stream_that_had_to_wait(fleet) -> None:
    one = replica()
    one.speak.clear()
    async with fleet(one, forward={"keepalive_s": 0.05}) as it, it.sdk() as sdk:
        stream = await sdk.chat.completions.create(**ASK, stream=True)  # the head comes early
        one.speak.set()
        said = [part.choices[0].delta.content async for part in stream]
        assert "".join(word or "" for word in said) == TEXT


# Clients that leave -----------------------------------------------------------------------------


async def left_in(it: Fleet, one: ScriptedReplica, ready: Any, **body: Any) -> float:
    """Ask, wait for `ready`, leave; how long until the replica knows."""
    task = asyncio.ensure_future(it.chat(**body))
    await until(ready)
    began = asyncio.get_running_loop().time()
    task.cancel()
    await until(lambda: one.left or it.gateway.pump.dispatcher.in_flight == 0)
    await until(lambda: it.gateway.pump.dispatcher.in_flight == 0)
    return asyncio.get_running_loop().time() - began


async def test_a_client_that_leaves_before_the_first_byte_aborts_its_request(fleet) -> None:
    async def never(request: Any, body: Any) -> Any:
        await asyncio.Event().wait()

    one = replica()
    one.answer = never
    async with fleet(one) as it:
        assert await left_in(it, one, lambda: one.received) < 1
        await until(lambda: one.left, within_s=1)
        row = await one_row(it)
        assert (row["cut"], row["completion_tokens"], row["estimated"]) == (1, 0, 1)
        assert row["prompt_tokens"] > 0


async def test_a_client_that_leaves_mid_stream_is_billed_what_was_made(fleet) -> None:
    async def forever(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        for part in chunks(BASE)[:-1]:
            await response.write(part)
        said.set()
        await asyncio.Event().wait()
        return response

    one, said = replica(), asyncio.Event()
    one.answer = forever
    async with fleet(one) as it:

        async def read_some() -> None:
            body = {**ASK, "stream": True}
            async with it.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                seen = b""
                async for part in answer.aiter_raw():
                    seen += part
                    if seen.count(b"\n\n") == len(WORDS) + 1:
                        return  # leaving the block closes the connection

        await read_some()
        await until(lambda: one.left, within_s=1)
        row = await one_row(it)
        assert (row["cut"], row["completion_tokens"]) == (1, len(WORDS) + 1)
        assert row["estimated"] == 1
        assert it.gateway.pump.dispatcher.in_flight == 0


async def test_a_client_that_leaves_the_queue_leaves_no_trace(fleet) -> None:
    one = replica(capacity=1)
    async with fleet(one) as it:
        dispatcher = it.gateway.pump.dispatcher
        async with full(it, one):
            waiting = asyncio.ensure_future(it.chat())
            await until(lambda: dispatcher.queued == 1)
            waiting.cancel()
            await until(lambda: dispatcher.queued == 0, within_s=1)
        dispatcher.check()
        assert len(one.received) == 2
        row = await one_row(it)
        assert (row["ok"], row["cut"], row["prompt_tokens"]) == (2, 1, 14)


async def test_a_reset_after_done_is_a_success(fleet) -> None:
    async def resets(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        await response.write(b"".join(chunks(BASE)) + usage_event(BASE) + DONE)
        await asyncio.sleep(0.01)
        request.transport.abort()
        return response

    one = replica()
    one.answer = resets
    async with fleet(one) as it, it.sdk() as sdk:
        for _ in range(3):
            stream = await sdk.chat.completions.create(**ASK, stream=True)
            assert len([part async for part in stream]) == len(WORDS) + 2
        row = await one_row(it)
        assert (row["ok"], row["requests"]) == (3, 3)
