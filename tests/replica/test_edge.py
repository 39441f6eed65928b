"""What every call passes: errors in one shape, ids, bodies within bounds."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest


def _is_openai_error(reply: Any) -> bool:
    return set(reply["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/nowhere", 404, "There is no GET /nowhere."),
        ("POST", "/v1/v1/chat/completions", 404, "Did you mean /v1/chat/completions?"),
        ("GET", "/v1/models/", 404, "Did you mean /v1/models?"),
        ("GET", "/v1/completions", 405, "Method Not Allowed"),
        ("DELETE", "/health", 405, "Method Not Allowed"),
    ],
)
async def test_wrong_paths_and_methods_are_openai_errors(
    serve: Any, method: str, path: str, status: int, said: str
) -> None:
    served = await serve()
    async with served.http.request(method, served.url + path) as reply:
        assert reply.status == status
        body = await reply.json()
        assert _is_openai_error(body)
        assert said in body["error"]["message"]
        assert reply.headers["x-request-id"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(serve: Any, chunked: bool) -> None:
    served = await serve(body_max_bytes=2048)
    data = b'{"model": "tiny", "prompt": "' + b"x" * 10_000 + b'"}'

    async def pieces() -> Any:
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    body = pieces() if chunked else data
    async with served.http.post(served.url + "/v1/completions", data=body) as reply:
        assert reply.status == 413
        error = (await reply.json())["error"]
    assert error["code"] == "body_too_large"
    assert "2048" in error["message"]
    await served.tokens("tiny")


@pytest.mark.parametrize(
    ("body", "said"),
    [(b'{"model": }', "byte 10"), (b"", "byte 0"), (b"[]", "JSON object"), (b"\xff", "byte 0")],
)
async def test_a_body_that_is_no_object_is_400_with_the_place(
    serve: Any, body: bytes, said: str
) -> None:
    served = await serve()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"):
        async with served.http.post(served.url + path, data=body) as reply:
            error = (await reply.json())["error"]
        assert reply.status == 400
        if body or path != "/v1/load_lora_adapter":
            assert error["code"] == "invalid_json"
            assert said in error["message"]


async def test_a_compressed_body_is_read_and_its_bound_is_of_what_it_unpacks_to(
    serve: Any,
) -> None:
    served = await serve(body_max_bytes=4096)
    headers = {"Content-Encoding": "gzip"}
    url = served.url + "/v1/completions"
    small = gzip.compress(b'{"model": "tiny", "prompt": "x", "max_tokens": 1}')
    async with served.http.post(url, data=small, headers=headers) as reply:
        assert reply.status == 200
    bomb = gzip.compress(b'{"model": "tiny", "prompt": "' + b"x" * 1_000_000 + b'"}')
    assert len(bomb) < 4096
    async with served.http.post(url, data=bomb, headers=headers) as reply:
        assert reply.status == 413


async def test_a_request_keeps_its_id_and_a_bad_one_is_replaced(serve: Any) -> None:
    served = await serve()
    for given, kept in (("abc-1", True), ("x" * 200, False), ("a b", False)):
        async with served.http.get(
            served.url + "/health", headers={"x-request-id": given}
        ) as reply:
            assert (reply.headers["x-request-id"] == given) is kept


async def test_a_client_that_waits_to_be_told_to_go_on_is_told(serve: Any) -> None:
    served = await serve()
    reader, writer = await asyncio.open_connection(*served.replica._server.addresses[0])
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 100")
    writer.write(body)
    assert b"HTTP/1.1 200" in await reader.read()
    writer.close()
    await writer.wait_closed()
