"""What clients send: headers, fields, names of models, keys for idempotency, odd addresses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest
from scripted import BASE, DONE, ScriptedReplica, chunks, until, usage_event

from shared.messages import ReplicaReport

ASK: dict[str, Any] = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
OLD, NEW = "sha256:0123456789abcdef", "sha256:fedcba9876543210"
NAMES = ("shout", "org/pirate:v2", "a@b", "ünï")


class Versioned(ScriptedReplica):
    """Its adapters have digests as real ones have."""

    digest = OLD

    def report(self) -> ReplicaReport:
        said = super().report()
        adapters = tuple(replace(state, digest=self.digest) for state in said.adapters)
        return replace(said, adapters=adapters)


def replica(name: str = "replica-0", digest: str = OLD) -> Versioned:
    one = Versioned(name, adapters=NAMES)
    one.digest = digest
    return one


# Headers and fields -----------------------------------------------------------------------------


async def test_unknown_headers_reach_the_replica_and_secrets_and_hops_do_not(fleet) -> None:
    sent = {
        "X-Custom": "a, b",
        "x-stainless-lang": "python",
        "traceparent": "00-1-2-03",
        "OpenAI-Organization": "org-1",
        "api-key": "lp-other",
        "cookie": "a=b",
        "te": "trailers",
        "proxy-authorization": "Basic x",
        "x-loraplex-fleet-token": "forged",
        "X-Loraplex-Anything": "forged",
        "x-request-id": "theirs",
        "accept-encoding": "br",
        "connection": "keep-alive, x-hop",
        "x-hop": "1",
    }
    one = replica()
    async with fleet(one, fleet={"token": "secret"}) as it:
        answer = await it.http.post("/v1/chat/completions", json=ASK, headers=sent)
        assert answer.status_code == 200
        got = one.received[0][0].headers
        for name in ("X-Custom", "x-stainless-lang", "traceparent", "OpenAI-Organization"):
            assert got.getall(name) == [sent[name]]
        for name in (
            *("authorization", "api-key", "cookie", "te", "proxy-authorization", "connection"),
            *("x-loraplex-anything", "x-hop", "accept-encoding"),
        ):
            assert name not in got, name
        assert got.getall("x-loraplex-fleet-token") == ["secret"]
        assert got.getall("x-request-id") == [answer.headers["x-request-id"]]
        assert got.getall("content-type") == ["application/json"]
        assert got.getall("host") == [one.url.removeprefix("http://")]


async def test_unknown_and_known_fields_reach_the_replica_as_they_were(fleet) -> None:
    fields = {
        "temperature": 0.5,
        "max_completion_tokens": 5,
        "n": 1,
        "stop": ["a", "b"],
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "response_format": {"type": "json_object"},
        "user": "u",
        "metadata": {"a": "b"},
    }
    extra = {"guided_json": {"type": "object"}, "min_p": 0.1, "chat_template_kwargs": {"x": None}}
    content = [{"type": "text", "text": "hé"}]
    one = replica()
    async with fleet(one) as it, it.sdk() as sdk:
        messages = [{"role": "user", "content": content}]
        await sdk.chat.completions.create(model=BASE, messages=messages, **fields, extra_body=extra)
        assert one.received[0][1] == {"model": BASE, "messages": messages, **fields, **extra}


@pytest.mark.parametrize("field", ["lora_request", "lora_path", "cache_salt", "adapter_id"])
async def test_only_model_selects_weights_or_a_cache(fleet, field: str) -> None:
    one = replica()
    async with fleet(one) as it:
        answer = await it.chat(**{field: "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert not one.received


async def test_the_key_may_come_either_way_but_not_twice(fleet) -> None:
    async with fleet(replica()) as it:
        key = it.http.headers.pop("authorization").removeprefix("Bearer ")
        for headers in ([("Authorization", f"bearer {key}")], [("api-key", key)]):
            assert (await it.http.get("/v1/models", headers=headers)).status_code == 200
        twice = [("Authorization", f"Bearer {key}"), ("Authorization", "Bearer lp-other")]
        assert (await it.http.get("/v1/models", headers=twice)).status_code == 401


# Names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        *(("shout", "shout"), ("org/pirate:v2", "org/pirate:v2"), ("a@b", "a@b"), (BASE, BASE)),
        *(("shout@012345", "shout"), ("shout@0123456789ABCDEF", "shout")),
        *((f"{BASE}:shout", "shout"), (f"{BASE}:org/pirate:v2@012345", "org/pirate:v2")),
        *(("ünï", "ünï"), (f"{BASE}:ünï", "ünï")),
    ],
)
async def test_a_name_a_version_and_an_alias_reach_the_adapter_and_are_echoed(
    fleet, asked: str, sent: str
) -> None:
    one = replica()
    async with fleet(one) as it, it.sdk() as sdk:
        answer = await sdk.chat.completions.create(**{**ASK, "model": asked})
        assert answer.model == asked
        options = {"include_usage": True}
        stream = await sdk.chat.completions.create(
            **{**ASK, "model": asked}, stream=True, stream_options=options
        )
        seen = [part async for part in stream]
        assert {part.model for part in seen} == {asked}
        assert seen[-1].usage is not None
        assert [body["model"] for _, body in one.received] == [sent, sent]
        assert [row["adapter"] for row in await it.usage()] == [sent]
        raw = await it.chat(asked, stream=True)
        expected = b"".join(chunks(sent)) + DONE
        name = orjson.dumps(sent)
        assert raw.content == expected.replace(
            b'"model":' + name, b'"model":' + orjson.dumps(asked)
        )


@pytest.mark.parametrize(
    "asked",
    [
        *("Shout", "shout@fedcba", "shout@01234", "shout@zzzzzz", "shout@", "other:shout"),
        *(f"{BASE}:", f"{BASE}@012345", f"{BASE}:{BASE}", "nobody@012345", "x"),
    ],
)
async def test_a_name_that_nobody_serves_is_not_found(fleet, asked: str) -> None:
    async with fleet(replica()) as it, it.sdk() as sdk:
        with pytest.raises(openai.NotFoundError) as caught:
            await sdk.chat.completions.create(**{**ASK, "model": asked})
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert asked in caught.value.message


@pytest.mark.parametrize("asked", ["a/../b", "..", "x" * 257, "a\nb", "a\u0000", "u\u0308"])
async def test_what_can_be_no_name_is_told_so(fleet, asked: str) -> None:
    async with fleet(replica()) as it, it.sdk() as sdk:
        with pytest.raises(openai.BadRequestError) as caught:
            await sdk.chat.completions.create(**{**ASK, "model": asked})
        assert caught.value.param == "model"
        assert len(caught.value.message) < 400


async def test_rights_go_by_the_adapters_own_name(fleet) -> None:
    async with fleet(replica(), models=("shout",)) as it:
        for asked in ("shout", "shout@012345", f"{BASE}:shout"):
            assert (await it.chat(asked)).status_code == 200
        for asked in (f"{BASE}:a@b", "org/pirate:v2@012345", BASE):
            assert (await it.chat(asked)).status_code == 404


async def test_a_version_is_served_by_a_replica_that_holds_it(fleet) -> None:
    old, new = replica("replica-0", OLD), replica("replica-1", NEW)
    async with fleet(old, new) as it:
        for asked, digest in (("shout@0123456", OLD), ("shout@fedcba", NEW)) * 4:
            answer = await it.chat(asked)
            assert answer.status_code == 200
            assert answer.headers["x-loraplex-adapter-version"] == digest
        assert (len(old.received), len(new.received)) == (4, 4)
        await new.stop()
        await until(lambda: it.gateway.pump.dispatcher.view(0)[1].state != "up")
        assert (await it.chat("shout@fedcba")).status_code in (404, 503)
        assert len(old.received) == 4
        it.gateway.pump.dispatcher.check()


async def test_a_replica_that_tells_its_bases_name_is_corrected(fleet) -> None:
    """Some engines answer with the name of what they loaded, whatever was asked."""

    async def base_named(request: Any, body: Any) -> Any:
        return await one.well(request, {**body, "model": BASE})

    one = replica()
    one.answer = base_named
    async with fleet(one) as it, it.sdk() as sdk:
        answer = await sdk.chat.completions.create(**{**ASK, "model": "shout"})
        assert answer.model == "shout"
        raw = await it.chat("shout", stream=True, stream_options={"include_usage": True})
        assert raw.content == b"".join(chunks("shout")) + usage_event("shout") + DONE


# Idempotency ------------------------------------------------------------------------------------


async def test_a_key_runs_once_and_the_second_is_told_which_request_had_it(fleet) -> None:
    one = replica()
    async with fleet(one) as it, it.sdk(retries=2) as sdk:
        key = {"Idempotency-Key": "order-7"}
        one.speak.clear()
        first = asyncio.ensure_future(
            it.http.post("/v1/chat/completions", json={**ASK, "stream": True}, headers=key)
        )
        await until(lambda: one.received)
        for _ in range(2):  # while it runs, and after it was answered
            with pytest.raises(openai.ConflictError) as caught:
                await sdk.chat.completions.create(**ASK, extra_headers=key)
            assert caught.value.response.headers["x-should-retry"] == "false"
            one.speak.set()
            assert (await first).headers["x-request-id"] in caught.value.message
        assert len(one.received) == 1
        assert "idempotency-key" not in one.received[0][0].headers
        other = {"Idempotency-Key": "order-8"}
        assert (await it.http.post("/v1/chat/completions", json=ASK, headers=other)).is_success


async def test_a_key_is_free_again_when_its_request_was_not_answered(fleet) -> None:
    one = replica()
    key = {"Idempotency-Key": "order-7"}
    async with fleet(one) as it:
        refused = await it.http.post(
            "/v1/chat/completions", json={**ASK, "model": "nobody"}, headers=key
        )
        assert refused.status_code == 404
        one.speak.clear()
        body = {**ASK, "stream": True}
        cut = asyncio.ensure_future(it.http.post("/v1/chat/completions", json=body, headers=key))
        await until(lambda: one.received)
        cut.cancel()
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 0)
        one.speak.set()
        for _ in range(50):
            answer = await it.http.post("/v1/chat/completions", json=ASK, headers=key)
            if answer.status_code != 409:
                break
        assert answer.status_code == 200


async def test_a_key_is_one_tenants_and_what_can_be_none_is_told(fleet) -> None:
    async with fleet(replica()) as it:
        await it.gateway.registry.create("other")
        _, secret = await it.gateway.registry.key_create("other")
        await until(lambda: it.gateway.registry.tenant_for_key(secret))
        for authorization in (f"Bearer {it.key}", f"Bearer {secret}"):
            headers = {"Idempotency-Key": "same", "authorization": authorization}
            answer = await it.http.post("/v1/chat/completions", json=ASK, headers=headers)
            assert answer.status_code == 200
        long = {"Idempotency-Key": "x" * 256}
        answer = await it.http.post("/v1/chat/completions", json=ASK, headers=long)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")
