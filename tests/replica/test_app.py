"""A whole replica under mixed load, and how it stops."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from replica.app import Replica
from replica.config import ReplicaConfig
from replica.engine.tiny import tiny_adapter, tiny_model
from shared.settings import BadSettings

MODELS = ("tiny", "ada", "bob", "cyd", "dee", "eve", "fay")
WORDS = ("once", "upon", "a", "time", "there", "was", "an", "adapter", "in", "a", "slot")


def _requests(seed: int, count: int) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    return [
        {
            "model": dice.choice(MODELS),
            "prompt": " ".join(dice.choices(WORDS, k=dice.randint(1, 30))),
            "max_tokens": dice.randint(1, 16),
            "temperature": 0,
            "ignore_eos": dice.random() < 0.5,
            "stream": dice.random() < 0.5,
        }
        for _ in range(count)
    ]


async def _text(served: Any, body: dict[str, Any]) -> str:
    async with served.http.post(served.url + "/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        raw = await reply.read()
    if not body["stream"]:
        return str(orjson.loads(raw)["choices"][0]["text"])
    *events, done, rest = raw.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return "".join(
        orjson.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events
    )


async def test_200_mixed_requests_over_6_adapters_on_2_slots_answer_as_if_alone(
    serve: Any,
) -> None:
    bodies = _requests(seed=7, count=200)
    tight = {"max_loras": 2, "max_cpu_loras": 3}
    roomy = await serve(**tight, max_running=16, max_step_tokens=64)
    alone = [await _text(roomy, body) for body in bodies]
    short_of_pages = await serve(
        **tight, max_running=8, max_step_tokens=16, pages=20, max_model_len=192
    )
    for served in (roomy, short_of_pages):
        asked = asyncio.Semaphore(40)

        async def among_others(body: dict[str, Any]) -> str:
            async with asked:  # noqa: B023 (gathered below, within the loop)
                return await _text(served, body)  # noqa: B023

        together = await asyncio.gather(*map(among_others, bodies))
        await served.idle()
        assert together == alone
    # That the adapters matter: the same prompt says something else with another one.
    assert len({await roomy.tokens(model) for model in MODELS}) == len(MODELS)


async def test_clients_that_come_and_go_leave_nothing_behind(serve: Any) -> None:
    served = await serve(max_running=4, max_step_tokens=32)
    dice = random.Random(3)

    async def impatient(body: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(dice.uniform(0, 0.2)):
                await _text(served, body)
        except TimeoutError:
            pass

    for _ in range(4):
        await asyncio.gather(*map(impatient, _requests(dice.randrange(1000), 25)))
    await served.idle()
    assert not served.replica.front._generations
    text = await served.tokens("ada")
    assert text == await served.tokens("ada")


async def test_stopping_lets_run_what_runs(serve: Any) -> None:
    served = await serve(drain_s=20)
    running = asyncio.ensure_future(served.tokens("ada", tokens=150, ignore_eos=True))
    await served.until(lambda: served.replica.front.report.running == 1)
    stopping = asyncio.ensure_future(served.replica.stop())
    await asyncio.sleep(0.01)
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (503, "draining")
    assert await running
    await asyncio.wait_for(stopping, 5)


async def test_what_runs_past_the_deadline_ends_with_an_error(serve: Any) -> None:
    served = await serve(drain_s=0.05)
    url = served.url + "/v1/completions"
    body = {"model": "ada", "prompt": "x", "ignore_eos": True, "stream": True}
    async with served.http.post(url, json=body) as reply:
        await reply.content.readuntil(b"\n\n")
        await asyncio.wait_for(served.replica.stop(), 5)
        raw = await reply.read()
    last = raw.strip().split(b"\n\n")[-1]
    assert orjson.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
    assert b"[DONE]" not in raw


async def test_a_hurried_stop_does_not_wait(serve: Any) -> None:
    served = await serve(drain_s=60)
    running = asyncio.ensure_future(
        served.post("/v1/completions", {"model": "ada", "prompt": "x", "ignore_eos": True})
    )
    await served.until(lambda: served.replica.front.report.running == 1)
    hurry = asyncio.Event()
    stopping = asyncio.ensure_future(served.replica.stop(hurry=hurry))
    hurry.set()
    await asyncio.wait_for(stopping, 5)
    assert (await running)[0] == 503


async def test_a_base_with_a_window_serves_texts_longer_than_its_pool(
    serve: Any, tmp_path: Path
) -> None:
    config = tiny_model(tmp_path / "base", family="mistral", context=1024)
    tiny_adapter(tmp_path / "adapters" / "ada", config, r=4)
    paths = {"base": tmp_path / "base", "adapters": tmp_path / "adapters", "max_step_tokens": 32}
    small, roomy = await serve(**paths, pages=24), await serve(**paths, pages=400)
    assert small.replica.front.report.max_model_len == 1024, "not half of its 384 tokens"
    text = "There was a lighthouse on the last rock before the open sea. " * 12
    bodies = [("tiny", text), ("ada", text), ("tiny", text[:500]), ("ada", text[:421])]

    async def answers(served: Any) -> list[str]:
        wanted = (served.tokens(model, prompt, 60, n=2) for model, prompt in bodies)
        return await asyncio.gather(*wanted)

    said = await answers(small)
    assert len(set(said)) == len(said)
    assert said == await answers(roomy)
    await small.idle()


async def test_open_report_streams_do_not_hold_up_a_stop(serve: Any) -> None:
    served = await serve(heartbeat_s=30)
    async with served.http.get(served.url + "/reports") as reports:
        await reports.content.readline()
        await asyncio.wait_for(served.replica.stop(), 3)
        await reports.read()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapters": "nowhere"}, "adapters: nowhere is no directory"),
        ({"max_cpu_loras": 1}, "max_cpu_loras"),
        ({"max_step_tokens": 1}, "max_step_tokens"),
        ({"max_model_len": 100_000}, "max_model_len: base and pages allow 4096"),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    tiny: Path, settings: dict[str, Any], said: str
) -> None:
    paths = {"base": tiny / "base", "adapters": tiny / "adapters"}
    with pytest.raises(BadSettings, match=said):
        Replica(ReplicaConfig.model_validate({**paths, **settings}))
