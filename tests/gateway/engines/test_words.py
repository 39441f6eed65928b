"""What each make of server says of a request, as clients of the gateway hear it.

Refusals are in the words of the sources: vLLM's from a transcript of release 0.32; SGLang's
`create_error_response` and `ErrorResponse` (entrypoints/openai/utils.py, protocol.py); LoRAX's
`ErrorResponse` and the statuses of `InferError` (router/src/lib.rs, server.rs); trtllm-serve's
`create_error_response` (serve/openai_server.py); FastAPI's own for a request that it cannot read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted import until
from served import Served, before, entry

from gateway.completion.refusal import refusal
from gateway.state.adapter_records import AdapterVersion
from shared.ids import AdapterId, ReplicaId

DIGEST = "0123456789abcdef"
CHAT = "/v1/chat/completions"
LISTED = {"data": [{"id": "base", "parent": None}, {"id": "pirate", "parent": "base"}]}
TOO_LONG = "This model's maximum context length is 1024 tokens."
ERROR = {"message": TOO_LONG, "type": "BadRequestError", "param": None, "code": 400}
BARE = {"object": "error", **ERROR}


@pytest.mark.parametrize(
    ("kind", "status", "said", "param"),
    [
        ("vllm", 400, {"error": {**ERROR, "param": "n"}}, "n"),
        ("sglang", 400, BARE, None),
        ("lorax", 422, {"error": TOO_LONG, "error_type": "validation"}, None),
        ("trtllm", 400, BARE, None),
    ],
)
async def test_a_refusal_is_openais_whatever_the_servers_shape(
    valkey_url: str, tmp_path: Path, kind: str, status: int, said: Any, param: str | None
) -> None:
    pages: dict[str, Any] = {
        "/v1/models": (200, LISTED),
        "/info": (200, {"model_id": "base"}),
        CHAT: (status, said),
    }
    async with (
        Served(pages) as server,
        before(valkey_url, tmp_path, entry(server, kind=kind)) as it,
        it.sdk() as sdk,
    ):
        wanted = openai.BadRequestError if status == 400 else openai.UnprocessableEntityError
        for stream in (False, True):
            with pytest.raises(wanted) as refused:
                await sdk.chat.completions.create(
                    model="base", messages=[{"role": "user", "content": "hi"}], stream=stream
                )
            assert refused.value.body == {
                "message": TOO_LONG,
                "type": "invalid_request_error",
                "param": param,
                "code": None,
            }
        assert {row["refused"] for row in await it.usage()} == {2}


def test_what_is_openais_already_is_not_touched_and_what_is_no_error_is_none() -> None:
    whole = {"message": "no", "type": "rate_limit_error", "param": "x", "code": "y", "more": 1}
    assert refusal(400, {"error": whole}) == {"error": whole}
    fault = {"message": "no", "type": "InternalServerError", "code": 500}
    mended = {"message": "no", "type": "server_error", "param": None, "code": None}
    assert refusal(500, {"error": fault}) == {"error": mended}
    for payload in (None, {}, {"detail": [{"loc": []}]}, {"error": 3}, {"error": {"code": 1}}):
        assert refusal(400, payload) is None


async def test_a_server_that_has_lost_an_adapter_is_left_for_one_that_has_it(
    valkey_url: str, tmp_path: Path
) -> None:
    """vLLM after a restart between two looks, or after another's unload: it lists it no more."""
    gone = "The model `pirate` does not exist. Valid aliases: base."
    lost = {"error": {"message": gone, "type": "NotFoundError", "param": "model", "code": 404}}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    well = {"model": "pirate", "choices": [], "usage": usage}
    pages: list[dict[str, Any]] = [{"/v1/models": (200, LISTED)} for _ in range(2)]
    async with Served(pages[0]) as one, Served(pages[1]) as two:
        entries = [entry(server, kind="vllm") for server in (one, two)]
        async with before(valkey_url, tmp_path, *entries) as it:
            digest_at = it.gateway.pump.dispatcher.digest_at
            for each in entries:
                await until(
                    lambda each=each: (
                        digest_at(ReplicaId(each["id"]), AdapterId("pirate"))  # type: ignore[misc]
                        is not None
                    )
                )
            for a, b in ((0, 1), (1, 0)):
                pages[a][CHAT], pages[b][CHAT] = (404, lost), (200, well)
                answer = await it.chat("pirate")
                assert answer.status_code == 200
                assert answer.headers["x-loraplex-replica"] == entries[b]["id"]
            pages[0][CHAT] = pages[1][CHAT] = (404, lost)
            answer = await it.chat("pirate")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert "aliases" not in answer.text


async def test_loraxs_stream_is_metered_by_the_usage_in_its_last_event(
    valkey_url: str, tmp_path: Path
) -> None:
    """`ChatCompletionStreamResponse`: usage beside the last choice, and no event of its own."""
    events = [
        {"model": "p", "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Ar"}}]},
        {
            "model": "p",
            "choices": [{"index": 0, "delta": {"content": "rr"}, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": 2},
        },
    ]
    text = "".join(f"data:{json.dumps(one)}\n\n" for one in events) + "data:[DONE]\n\n"
    pages: dict[str, Any] = {"/info": (200, {"model_id": "base"}), CHAT: (200, text)}
    async with (
        Served(pages) as server,
        before(valkey_url, tmp_path, entry(server, kind="lorax", slots=2)) as it,
        it.sdk() as sdk,
    ):
        await it.gateway.registry.adapter_version("pirate", AdapterVersion(DIGEST, "/p/1"))
        await until(lambda: "pirate" in it.gateway.pump.dispatcher.adapters())
        stream = await sdk.chat.completions.create(
            model="pirate", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        said = [chunk async for chunk in stream]
        assert [chunk.choices[0].delta.content for chunk in said] == ["Ar", "rr"]
        assert {chunk.model for chunk in said} == {"pirate"}
        [row] = await it.usage()
        assert (row["prompt_tokens"], row["completion_tokens"], row["estimated"]) == (7, 2, 0)
        [sent] = server.sent(CHAT)
        assert sent["model"] == "/p/1"
