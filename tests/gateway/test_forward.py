"""Replicas that refuse, freeze, die, lie and talk nonsense; what the client then sees."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest
from aiohttp import web
from scripted import BASE, DONE, WORDS, Answer, Fleet, ScriptedReplica, chunks, event, until

ASK = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
ERROR = {"error": {"message": "too long", "type": "invalid_request_error", "param": "messages"}}


def pair(answer: Answer | None = None) -> tuple[ScriptedReplica, ScriptedReplica]:
    """Two replicas, both with `answer`, if any."""
    both = tuple(ScriptedReplica(f"replica-{n}", adapters=("shout",)) for n in (0, 1))
    for one in both:
        one.answer = answer
    return both


async def home_of(it: Fleet, model: str = "shout") -> tuple[ScriptedReplica, ScriptedReplica]:
    """The replica that a request for `model` goes to first, and the other."""
    name = (await it.chat(model)).headers["x-loraplex-replica"]
    first, second = sorted(it.replicas, key=lambda one: one.name != name)
    first.received.clear()
    return first, second


def answers(status: int, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    async def answer(request: web.Request, sent: dict[str, Any]) -> web.StreamResponse:
        text = body if isinstance(body, bytes) else orjson.dumps(body or {"detail": "no"})
        return web.Response(status=status, body=text, headers=headers)

    return answer


async def resets(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    request.transport.abort()
    raise ConnectionResetError


async def talks_nonsense(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    request.transport.write(b"\x00\x01 nonsense\r\n\r\n")
    await asyncio.Event().wait()
    raise AssertionError


async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def stops_after_its_head(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    request.transport.abort()
    return response


# Another replica, while that is safe ------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        resets,
        talks_nonsense,
        stops_after_its_head,
        answers(429, {"error": {"message": "full"}}),
        answers(503),
        answers(502, b"<html>"),
        answers(200, b"[1, 2"),
        answers(200, b"<html>nothing</html>", {"content-type": "text/html"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_fails_before_its_answer_is_left_for_another(
    fleet, fault: Answer, stream: bool
) -> None:
    async with fleet(*pair()) as it:
        home, other = await home_of(it)
        home.answer = fault
        answer = await it.chat("shout", stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-loraplex-replica"] == other.name
        assert "Hel" in answer.text
        # A connection that was kept and then reset may have been stale: it is tried once more.
        assert len(home.received) == (2 if fault is resets else 1)
        assert len(other.received) == 1
        (row,) = await it.usage()  # with the one that found its home
        assert (row["requests"], row["ok"]) == (2, 2), "a retry is billed once"
        it.gateway.pump.dispatcher.check()


async def test_a_refused_connection_is_left_at_once_and_found_again(fleet) -> None:
    async with fleet(*pair()) as it:
        home, other = await home_of(it)
        await home.stop()
        for _ in range(4):
            answer = await it.chat("shout")
            assert (answer.status_code, answer.headers["x-loraplex-replica"]) == (200, other.name)
        await home.start()
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (await it.chat("shout")).headers["x-loraplex-replica"] != home.name:
            assert loop.time() - began < 5
            await asyncio.sleep(0.02)


async def test_what_every_replica_refuses_is_told_as_what_it_was(fleet) -> None:
    async with fleet(*pair(answers(429, headers={"retry-after": "7"}))) as it:
        answer = await it.chat("shout")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_overloaded"
        assert answer.headers["retry-after"] == "7"
        assert sum(len(one.received) for one in it.replicas) == 2
        (row,) = await it.usage()
        assert (row["requests"], row["failed"], row["completion_tokens"]) == (1, 1, 0)


async def test_attempts_are_bounded(fleet) -> None:
    many = [ScriptedReplica(f"replica-{n}", adapters=("shout",)) for n in range(4)]
    for one in many:
        one.answer = resets
    async with fleet(*many, forward={"attempts": 2}) as it, it.sdk() as sdk:
        with pytest.raises(openai.InternalServerError) as caught:
            await sdk.chat.completions.create(**{**ASK, "model": "shout"})
        assert caught.value.status_code == 502
        assert "http" not in caught.value.message  # names no address
        assert sum(len(one.received) for one in many) == 2
        (row,) = await it.usage()
        assert (row["failed"], row["prompt_tokens"]) == (1, 0)


async def test_a_replica_that_never_answers_is_left_after_the_limit(fleet) -> None:
    async with fleet(*pair(), forward={"first_byte_timeout_s": 0.3}) as it:
        home, other = await home_of(it)
        home.answer = never
        assert (await it.chat("shout")).headers["x-loraplex-replica"] == other.name
        other.answer = never
        answer = await it.chat("shout")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "replica_timeout")
        await until(lambda: len(home.left) == 2 and other.left)


async def test_a_frozen_replica_is_left_when_its_reports_stop(fleet) -> None:
    both = pair()
    for one in both:
        one.heartbeat_s = 0.1
    async with fleet(*both) as it:
        home, other = await home_of(it)
        home.answer = never
        asked = asyncio.ensure_future(it.chat("shout"))
        await until(lambda: home.received)
        home.reporting = False  # the host is gone: no reset tells of it
        answer = await asyncio.wait_for(asked, 3)
        assert (answer.status_code, answer.headers["x-loraplex-replica"]) == (200, other.name)


# What passes as it is ---------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 413, 422, 500])
async def test_an_openai_error_of_the_replica_passes_untouched(fleet, status: int) -> None:
    async with fleet(*pair(answers(status, ERROR))) as it:
        for stream in (False, True):
            answer = await it.chat("shout", stream=stream)
            assert answer.status_code == status
            assert answer.json() == ERROR
            assert answer.headers["x-request-id"]
        assert sum(len(one.received) for one in it.replicas) == 2
        (row,) = await it.usage()
        assert row["failed" if status >= 500 else "refused"] == 2


async def test_a_404_for_an_adapter_is_our_own_once_every_replica_was_asked(fleet) -> None:
    """It has lost the adapter; its own words may name what is others'."""
    async with fleet(*pair(answers(404, ERROR))) as it:
        answer = await it.chat("shout")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert ERROR["error"]["message"] not in answer.text
        assert [len(one.received) for one in it.replicas] == [1, 1]
        (row,) = await it.usage()
        assert (row["requests"], row["refused"]) == (1, 1)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"plain"),
        (500, b"Traceback at http://10.0.0.1"),
        (401, orjson.dumps(ERROR)),
        (302, b""),
    ],
)
async def test_an_error_of_another_shape_is_given_one(fleet, status: int, body: bytes) -> None:
    async with fleet(*pair(answers(status, body))) as it:
        answer = await it.chat("shout")
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "replica_lost"
        assert "10.0.0.1" not in answer.text


async def test_an_error_after_an_early_head_is_told_inside_the_stream(fleet) -> None:
    async def late(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return web.json_response(ERROR, status=400)

    async with fleet(*pair(late), forward={"keepalive_s": 0.1}) as it, it.sdk() as sdk:
        answer = await it.chat("shout", stream=True)
        assert answer.status_code == 200
        assert event(ERROR).decode() in answer.text
        assert "[DONE]" not in answer.text
        stream = await sdk.chat.completions.create(**{**ASK, "model": "shout"}, stream=True)
        with pytest.raises(openai.APIError, match="too long"):
            [part async for part in stream]


# After the first byte ---------------------------------------------------------------------------


def dies_after(parts: int, how: str) -> Answer:
    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        wire = b"".join(chunks(body["model"])[:parts]) + b'data: {"choices":[{"del'
        await response.write(wire)
        await asyncio.sleep(0.05)
        if how == "reset":
            request.transport.abort()
        elif how == "freeze":
            await asyncio.Event().wait()
        return response

    return answer


@pytest.mark.parametrize("how", ["reset", "end", "freeze"])
async def test_a_replica_that_dies_mid_stream_is_an_error_event_and_no_done(fleet, how) -> None:
    both = pair(dies_after(3, how))
    async with fleet(*both, forward={"idle_timeout_s": 0.3}) as it, it.sdk() as sdk:
        answer = await it.chat("shout", stream=True)
        sent = b"".join(chunks("shout")[:3])
        assert answer.content.startswith(sent)
        rest = answer.content[len(sent) :]
        assert rest.startswith(b"data: ")
        assert rest.endswith(b"\n\n")
        assert orjson.loads(rest[6:])["error"]["code"] in ("replica_lost", "replica_timeout")
        stream = await sdk.chat.completions.create(**{**ASK, "model": "shout"}, stream=True)
        said = []

        async def listen() -> None:
            async for part in stream:
                said.append(part.choices[0].delta.content)

        with pytest.raises(openai.APIError):
            await listen()
        assert said == [None, *WORDS[:2]]
        assert sum(len(one.received) for one in both) == 2  # nothing was repeated
        (row,) = await it.usage()
        assert (row["failed"], row["completion_tokens"], row["estimated"]) == (2, 6, 2)
        assert it.gateway.pump.dispatcher.in_flight == 0


async def test_the_replicas_own_error_event_is_not_doubled(fleet) -> None:
    async def gives_up(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(chunks("shout")[0] + event(ERROR))
        return response

    async with fleet(*pair(gives_up)) as it:
        answer = await it.chat("shout", stream=True)
        assert answer.content == chunks("shout")[0] + event(ERROR)
        (row,) = await it.usage()
        assert row["failed"] == 1


async def test_a_plain_reply_that_breaks_off_is_a_502_or_another_replicas(fleet) -> None:
    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        request.transport.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"id":')
        await asyncio.sleep(0.01)
        request.transport.abort()
        raise ConnectionResetError

    async with fleet(*pair()) as it:
        home, other = await home_of(it)
        home.answer = half
        assert (await it.chat("shout")).headers["x-loraplex-replica"] == other.name
        other.answer = half
        assert (await it.chat("shout")).status_code == 502


async def test_a_stream_without_a_count_is_billed_by_its_events(fleet) -> None:
    async def uncounted(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(chunks("shout")) + DONE)
        return response

    async with fleet(*pair(uncounted)) as it:
        assert (await it.chat("shout", stream=True)).content.endswith(DONE)
        (row,) = await it.usage()
        assert (row["ok"], row["estimated"]) == (1, 1)
        assert row["completion_tokens"] == len(chunks("shout")) + 1


async def test_a_slow_reader_takes_no_memory_here(fleet) -> None:
    """The replica is held back: what it could write stays near what the sockets hold."""
    written = 0
    big = event({"choices": [{"delta": {"content": "x" * (1 << 16)}}]})

    async def floods(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(2000):
            await response.write(big)
            written += len(big)
        await response.write(DONE)
        return response

    async with fleet(*pair(floods)) as it:
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.transport.pause_reading()
        body = orjson.dumps({**ASK, "model": "shout", "stream": True})
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
            % (it.key.encode(), len(body), body)
        )
        await until(lambda: written > 1 << 18)
        await asyncio.sleep(0.5)
        stuck = written
        await asyncio.sleep(0.3)
        assert written == stuck
        assert stuck < 40 << 20  # of 131 MB; the kernel's buffers of two hops hold some
        writer.transport.resume_reading()
        total = 0
        while data := await reader.read(1 << 20):
            total += len(data)
        assert total > 2000 * len(big)
        writer.close()


async def test_one_frozen_replica_delays_no_request_of_the_others(fleet) -> None:
    names = tuple(f"a{n}" for n in range(8))
    both = [ScriptedReplica(f"replica-{n}", adapters=names) for n in (0, 1)]
    async with fleet(*both) as it:
        homes = {name: (await it.chat(name)).headers["x-loraplex-replica"] for name in names}
        home, other = await home_of(it, names[0])
        home.answer = never
        stuck = [asyncio.ensure_future(it.chat(names[0])) for _ in range(4)]
        await until(lambda: len(home.received) == 4)
        theirs = [name for name in names if homes[name] == other.name][:3]  # it has slots for 4
        async with asyncio.timeout(2):
            answers = await asyncio.gather(*[it.chat(name) for name in theirs])
        assert {answer.headers["x-loraplex-replica"] for answer in answers} == {other.name}
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await until(lambda: len(home.left) == 4, within_s=1)
