"""What the official SDK depends on when something is refused: classes, codes, waits and retries."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from scripted import BASE, Fleet, ScriptedReplica, chunks, until

from gateway.config import ForwardConfig
from gateway.state.tenants import Limits

ASK: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}


def replica(**more: Any) -> ScriptedReplica:
    return ScriptedReplica("replica-0", adapters=("shout",), **more)


async def attempts(it: Fleet) -> int:
    """Requests that reached the gateway and were settled."""
    rows = await it.usage()
    return sum(row["requests"] for row in rows)


async def test_every_status_is_the_sdks_own_class_with_a_word_as_code(fleet) -> None:
    used = {"Idempotency-Key": "k1"}
    cases: list[tuple[type[openai.APIStatusError], str | None, dict[str, Any]]] = [
        (openai.BadRequestError, None, {"extra_body": {"lora_name": "x"}}),
        (openai.NotFoundError, "model_not_found", {"model": "nobody"}),
        (openai.ConflictError, "idempotency_key_reused", {"extra_headers": used}),
    ]
    async with fleet(replica()) as it, it.sdk() as sdk:
        await sdk.chat.completions.create(**ASK, extra_headers=used)
        for kind, code, more in cases:
            with pytest.raises(kind) as caught:
                await sdk.chat.completions.create(**{**ASK, **more})
            error = caught.value
            assert (error.code, error.type) == (code, "invalid_request_error")
            assert error.request_id.startswith("req_")
            assert set(error.body) == {"message", "type", "param", "code"}
            assert error.message.startswith("Error code")
        async with it.sdk("lp-wrong") as wrong:
            with pytest.raises(openai.AuthenticationError) as denied:
                await wrong.chat.completions.create(**ASK)
        assert denied.value.code == "invalid_api_key"


async def test_the_sdk_waits_as_long_as_it_is_told_and_then_succeeds(fleet) -> None:
    one = replica()
    async with fleet(one, limits=Limits(tokens_per_min=6000)) as it, it.sdk(retries=1) as sdk:
        one.speak.clear()
        held = asyncio.ensure_future(it.chat(stream=True, max_tokens=5960))
        await until(lambda: one.received)
        refused = await it.chat(max_tokens=100)
        wait_ms = float(refused.headers["retry-after-ms"])
        assert 300 < wait_ms < 1500
        assert float(refused.headers["retry-after"]) * 1000 >= wait_ms
        began = asyncio.get_running_loop().time()
        answer = await sdk.chat.completions.create(**ASK, max_tokens=100)
        took_ms = (asyncio.get_running_loop().time() - began) * 1000
        assert answer.choices
        assert wait_ms - 200 < took_ms < wait_ms + 2000  # its own backoff could be shorter
        assert one.received[-1][0].headers["x-stainless-retry-count"] == "1"
        one.speak.set()
        await held


async def test_a_limit_that_admits_nothing_is_insufficient_quota_and_not_retried(fleet) -> None:
    async with fleet(replica(), limits=Limits(tokens_per_min=0)) as it, it.sdk(retries=2) as sdk:
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(**ASK)
        error = caught.value
        assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
        assert error.response.headers["x-should-retry"] == "false"
        assert "retry-after" not in error.response.headers
        assert await attempts(it) == 1


async def test_overload_and_rate_and_quota_are_three_different_words(fleet) -> None:
    one = replica(capacity=1)
    queue = {"per_tenant_max": 1, "ttl_s": 0.4}
    async with fleet(one, queue=queue) as it, it.sdk() as sdk:
        one.speak.clear()
        running = [asyncio.ensure_future(it.chat(stream=True)) for _ in range(2)]
        dispatcher = it.gateway.pump.dispatcher
        await until(lambda: dispatcher.in_flight == 2)
        queued = asyncio.ensure_future(sdk.chat.completions.create(**ASK))
        await until(lambda: dispatcher.queued == 1)
        with pytest.raises(openai.RateLimitError) as full:
            await sdk.chat.completions.create(**ASK)
        assert full.value.code == "rate_limit_exceeded"
        with pytest.raises(openai.InternalServerError) as late:
            await queued
        assert (late.value.status_code, late.value.code) == (503, "server_overloaded")
        for caught in (full, late):
            headers = caught.value.response.headers
            assert 0 < float(headers["retry-after"]) <= 120
            assert 0 < float(headers["retry-after-ms"]) <= 120_000
            assert "x-should-retry" not in headers
        one.speak.set()
        await asyncio.gather(*running)


async def test_an_overload_that_passes_is_hidden_by_the_sdks_retry(fleet) -> None:
    async def busy_once(request: Any, body: Any) -> Any:
        if len(one.received) == 1:
            error = {"message": "full", "type": "server_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=503)
        return await one.well(request, body)

    one = replica()
    one.answer = busy_once
    async with fleet(one, forward={"attempts": 1}) as it, it.sdk(retries=2) as sdk:
        answer = await sdk.chat.completions.create(**ASK)
        assert answer.choices
        assert len(one.received) == 2


async def test_limits_are_told_on_every_reply_and_reset_is_a_duration(fleet) -> None:
    limits = Limits(requests_per_min=60, tokens_per_min=60_000)
    async with fleet(replica(), limits=limits) as it, it.sdk() as sdk:
        raw = await sdk.chat.completions.with_raw_response.create(**ASK, max_tokens=6000)
        streamed = await it.chat(stream=True)
        for headers in (raw.headers, streamed.headers):
            for what in ("requests", "tokens"):
                limit = int(headers[f"x-ratelimit-limit-{what}"])
                remaining = int(headers[f"x-ratelimit-remaining-{what}"])
                assert 0 <= remaining < limit == (60 if what == "requests" else 60_000)
                reset = headers[f"x-ratelimit-reset-{what}"]
                assert re.fullmatch(r"(\d+h)?(\d+m)?(\d+(\.\d+)?s)|\d+ms", reset), reset
        assert raw.headers["x-ratelimit-reset-requests"].endswith(("ms", "s"))
        assert raw.headers["x-ratelimit-reset-tokens"].startswith("6")  # 6000 of 1000 a second


async def test_every_reply_has_an_id_that_the_log_knows_with_the_clients_own(fleet, caplog) -> None:
    caplog.set_level("INFO", logger="gateway.completion.handlers")
    async with fleet(replica()) as it, it.sdk() as sdk:
        mine = {"X-Client-Request-Id": "order-7"}
        answer = await sdk.chat.completions.create(**ASK, extra_headers=mine)
        assert answer._request_id.startswith("req_")
        named = [record for record in caplog.records if record.msg == "request named"]
        assert [record.client_request_id for record in named] == ["order-7"]
        seen = {answer._request_id}
        for method, path in (
            *(("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")),
            *(("GET", "/v1/models/nobody"), ("DELETE", "/v1/models")),
        ):
            seen.add((await it.http.request(method, path)).headers["x-request-id"])
        assert len(seen) == 6
        assert one_of(it).received[0][0].headers["x-request-id"] == answer._request_id
        assert "x-client-request-id" not in one_of(it).received[0][0].headers


def one_of(it: Fleet) -> ScriptedReplica:
    return it.replicas[0]


async def test_a_failure_mid_stream_raises_in_the_sdk_and_has_no_done(fleet) -> None:
    async def dies(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        for part in chunks(BASE)[:2]:
            await response.write(part)
        await asyncio.sleep(0.05)
        request.transport.abort()
        return response

    one = replica()
    one.answer = dies
    async with fleet(one) as it, it.sdk(retries=2) as sdk:
        said: list[str | None] = []

        async def read() -> None:
            async for part in await sdk.chat.completions.create(**ASK, stream=True):
                said.append(part.choices[0].delta.content)

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert said[-1] == "Hel"
        assert caught.value.code == "replica_lost"
        assert len(one.received) == 1  # nothing is repeated after the first token
        raw = await it.chat(stream=True)
        *_, last = raw.text.rstrip("\n").split("\n\n")
        error = orjson.loads(last.removeprefix("data: "))["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "[DONE]" not in raw.text


async def test_a_body_that_is_no_json_is_a_400_that_names_the_byte(fleet) -> None:
    async with fleet(replica()) as it:
        text = '{"model": "tiny", "messages": [é'.encode()
        answer = await it.http.post("/v1/chat/completions", content=text)
        assert answer.status_code == 400
        assert "at byte 31" in answer.json()["error"]["message"]


def test_timeouts_of_the_gateway_are_below_the_clients() -> None:
    forward, client_s = ForwardConfig(), openai.DEFAULT_TIMEOUT.read
    assert max(forward.first_byte_timeout_s, forward.idle_timeout_s) < client_s
    assert forward.keepalive_s <= 15
