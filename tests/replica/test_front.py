"""Every request ends: the client goes, the disk is slow, the adapter fails, the engine crashes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from replica.canary import Canary
from replica.core.step import Step
from replica.engine.adapter_store import AdapterFolder, BadAdapter, HostAdapter
from replica.engine.runner import BROKEN, Drawn, Runner
from shared.ids import AdapterId


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward pass takes 20 ms longer, so that a test can act during a request."""
    run = Runner.run_with_logprobs

    def slowly(runner: Runner, step: Step) -> dict[str, Drawn]:
        time.sleep(0.02)
        return run(runner, step)

    monkeypatch.setattr(Runner, "run_with_logprobs", slowly)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reading an adapter waits for this."""
    gate = threading.Event()
    read = AdapterFolder.read

    def gated(folder: AdapterFolder, adapter: AdapterId) -> HostAdapter:
        gate.wait(20)
        return read(folder, adapter)

    monkeypatch.setattr(AdapterFolder, "read", gated)
    return gate


def _body(model: str, *, stream: bool, prompt: Any = "once", tokens: int = 500) -> dict[str, Any]:
    asks = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    return {"model": model, "prompt": prompt, **asks}


async def _ask_and_leave(
    served: Any, body: dict[str, Any], when: Callable[[], Awaitable[None]]
) -> None:
    """Send a request on a connection of its own and cut it when `when` returns."""
    data = orjson.dumps(body)
    reader, writer = await asyncio.open_connection(*served.replica._server.addresses[0])
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await when()
    writer.transport.abort()
    assert reader is not None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("slow_steps")
async def test_a_client_that_leaves_while_decoding_frees_all_it_held(
    serve: Any, stream: bool
) -> None:
    served = await serve()
    front = served.replica.front

    async def decoding() -> None:
        await served.until(lambda: front.report.running == 1)
        await asyncio.sleep(0.1)

    await _ask_and_leave(served, _body("ada", stream=stream), decoding)
    await served.idle(within_s=1)
    assert b'finish="abort"} 1.0' in served.replica.metrics.render()


@pytest.mark.usefixtures("slow_steps")
async def test_a_client_that_leaves_while_prefilling_frees_all_it_held(serve: Any) -> None:
    served = await serve(max_step_tokens=32)
    front = served.replica.front

    async def prefilling() -> None:
        await served.until(lambda: front.report.running == 1)

    body = _body("ada", stream=True, prompt=[5] * 3000, tokens=1)
    await _ask_and_leave(served, body, prefilling)
    await served.idle(within_s=1)


@pytest.mark.usefixtures("slow_steps")
async def test_a_client_that_leaves_the_queue_leaves_no_trace(serve: Any) -> None:
    served = await serve(max_running=1)
    front = served.replica.front
    first = asyncio.ensure_future(served.tokens("tiny", tokens=30, ignore_eos=True))

    async def queued() -> None:
        await served.until(lambda: front.report.waiting == 1)

    await served.until(lambda: front.report.running == 1)
    await _ask_and_leave(served, _body("ada", stream=True), queued)
    await served.until(lambda: front.report.waiting == 0, within_s=1)
    assert front.report.running == 1
    await first
    await served.idle(within_s=1)


async def test_a_client_that_leaves_during_a_load_leaves_no_trace(
    serve: Any, disk: threading.Event
) -> None:
    served = await serve()
    front = served.replica.front

    async def loading() -> None:
        await served.until(lambda: front.adapters["ada"].status == "loading")

    await _ask_and_leave(served, _body("ada", stream=True), loading)
    await served.until(lambda: front.report.waiting == 0, within_s=1)
    disk.set()
    await served.until(lambda: front.adapters["ada"].status == "ready")
    await served.idle(within_s=1)
    await served.tokens("ada")


async def test_a_slow_disk_delays_nobody_else(serve: Any, disk: threading.Event) -> None:
    served = await serve()
    waiting = asyncio.ensure_future(served.tokens("ada"))
    await served.until(lambda: served.replica.front.adapters["ada"].status == "loading")
    for _ in range(3):
        await asyncio.wait_for(served.tokens("tiny"), 5)
    assert not waiting.done()
    disk.set()
    assert await waiting


async def test_who_waits_for_an_adapter_that_fails_hears_why_and_never_base_text(
    serve: Any, store: Path, disk: threading.Event
) -> None:
    served = await serve(adapters=store)
    waiting = [
        asyncio.ensure_future(served.post("/v1/completions", _body("ada", stream=stream)))
        for stream in (False, True)
    ]
    await served.until(lambda: served.replica.front.report.waiting == 2)
    (store / "ada" / "adapter_model.safetensors").write_bytes(b"\x08broken")
    disk.set()
    for status, reply in await asyncio.gather(*waiting):
        assert status == 503
        assert reply["error"]["code"] == "adapter_load_failed"
    state = await served.adapter("ada")
    assert state["state"] == "FAILED"
    assert state["reason"]
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert await served.tokens("bob")
    assert b"loraplex_replica_adapter_load_failures_total 1.0" in served.replica.metrics.render()


async def test_a_passing_disk_fault_is_tried_again_later(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.adapters.RETRY_S", 0.1)
    read, faults = AdapterFolder.read, [BadAdapter("unreadable", "the disk is away")]

    def faulty(folder: AdapterFolder, adapter: AdapterId) -> HostAdapter:
        if faults:
            raise faults.pop()
        return read(folder, adapter)

    monkeypatch.setattr(AdapterFolder, "read", faulty)
    served = await serve(rescan_s=0.05)
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (503, "adapter_load_failed")
    await served.until(lambda: served.replica.front.servable("ada"))
    assert await served.tokens("ada")


async def test_an_adapter_that_failed_is_served_again_once_a_load_call_has_read_it(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, faults = Runner.load, [RuntimeError("out of memory")]

    def faulty(runner: Runner, slot: int, host: HostAdapter, pages: Sequence[int]) -> None:
        if faults:
            raise faults.pop()
        load(runner, slot, host, pages)

    monkeypatch.setattr(Runner, "load", faulty)
    served = await serve()
    status, _ = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert status == 503
    assert not served.replica.front.servable("ada")
    body = {"lora_name": "ada", "lora_path": "ada"}
    assert (await served.post("/v1/load_lora_adapter", body))[0] == 200
    assert await served.tokens("ada")


async def test_a_folder_that_changes_while_it_is_read_is_served_as_it_is_now(
    serve: Any, store: Path, disk: threading.Event
) -> None:
    served = await serve(adapters=store)
    waiting = asyncio.ensure_future(served.tokens("ada"))
    await served.until(lambda: served.replica.front.adapters["ada"].status == "loading")
    for file in (store / "bob").iterdir():
        (store / "ada" / file.name).write_bytes(file.read_bytes())
    disk.set()
    assert await waiting == await served.tokens("bob")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Once set, the next forward pass raises."""
    armed = threading.Event()
    run = Runner.run_with_logprobs

    def maybe(runner: Runner, step: Step) -> dict[str, Drawn]:
        if armed.is_set():
            raise RuntimeError("device lost")
        return run(runner, step)

    monkeypatch.setattr(Runner, "run_with_logprobs", maybe)
    return armed


@pytest.mark.usefixtures("slow_steps")
async def test_a_crash_ends_streams_with_an_error_and_health_tells_the_truth(
    serve: Any, poison: threading.Event
) -> None:
    served = await serve()
    assert (await served.get("/health"))[0] == 200
    reports = await served.http.get(served.url + "/reports")
    url, body = served.url + "/v1/completions", _body("ada", stream=True)
    async with served.http.post(url, json=body) as reply:
        assert reply.status == 200
        await reply.content.readuntil(b"\n\n")
        poison.set()
        raw = await reply.read()
    last = raw.strip().split(b"\n\n")[-1]
    error = orjson.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "engine_failed"
    assert "device lost" in error["message"]
    assert b"[DONE]" not in raw
    status, reply = await served.get("/health")
    assert (status, reply["error"]["code"]) == (500, "engine_failed")
    await asyncio.wait_for(reports.read(), 5)  # the stream ends: the gateway sees a loss
    status, _ = await served.post("/v1/completions", {"model": "tiny", "prompt": "x"})
    assert status == 500
    assert (await served.post("/v1/unload_lora_adapter", {"lora_name": "ada"}))[0] == 500


@pytest.mark.usefixtures("slow_steps")
async def test_a_crash_ends_plain_requests_with_500(serve: Any, poison: threading.Event) -> None:
    served = await serve()
    asks = served.post("/v1/completions", _body("ada", stream=False))
    request = asyncio.ensure_future(asks)
    await served.until(lambda: served.replica.front.report.running == 1)
    poison.set()
    status, reply = await request
    assert (status, reply["error"]["code"]) == (500, "engine_failed")


async def test_the_sdk_raises_when_a_stream_ends_with_an_error(
    serve: Any, poison: threading.Event
) -> None:
    served = await serve()
    stream = await served.sdk.completions.create(
        model="tiny", prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    poison.set()
    with pytest.raises(openai.APIError, match="device lost"):
        async for _ in stream:
            pass


async def test_a_row_that_is_not_finite_ends_its_own_request_only(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runner.run_with_logprobs

    def breaking(runner: Runner, step: Step) -> dict[str, Drawn]:
        drawn = run(runner, step)
        broken = {row.seq for row in step.rows if row.slot >= 0 and row.drawn == 3}
        return {seq: Drawn(BROKEN) if seq in broken else each for seq, each in drawn.items()}

    served = await serve()
    expected = await served.tokens("tiny", tokens=40)
    monkeypatch.setattr(Runner, "run_with_logprobs", breaking)
    bad = served.post("/v1/completions", _body("ada", stream=False))
    good = served.tokens("tiny", tokens=40)
    (status, reply), text = await asyncio.gather(bad, good)
    assert (status, reply["error"]["code"]) == (500, "generation_failed")
    assert text == expected
    await served.idle()


async def test_weights_that_overflow_are_said_and_not_tried_again(
    serve: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Canary, "fly", lambda *_: True)  # as if only a longer prompt overflowed
    weights = store / "ada" / "adapter_model.safetensors"
    tensors = {name: torch.full_like(each, 1e30) for name, each in load_file(weights).items()}
    save_file(tensors, weights)
    served = await serve(adapters=store)
    url = served.url + "/v1/completions"
    async with served.http.post(url, json=_body("ada", stream=False)) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["code"]) == (500, "generation_failed")
        assert "logits of `ada` are not finite" in error["message"]
        assert reply.headers["x-should-retry"] == "false"
    await served.idle()


async def test_a_step_that_hangs_makes_health_fail(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def hang(runner: Runner, step: Step) -> dict[str, Drawn]:
        gate.wait(20)
        return {}

    monkeypatch.setattr(Runner, "run_with_logprobs", hang)
    served = await serve(stall_s=0.2, heartbeat_s=0.05)
    request = asyncio.ensure_future(served.post("/v1/completions", _body("ada", stream=False)))
    async with served.http.get(served.url + "/reports") as reports:
        await asyncio.wait_for(reports.read(), 5)
    status, reply = await served.get("/health")
    assert status == 500
    assert "forward pass" in reply["error"]["message"]
    gate.set()
    assert (await request)[0] == 500


async def test_silence_is_broken_by_comments_and_a_late_failure_is_an_event(
    serve: Any, store: Path, disk: threading.Event
) -> None:
    served = await serve(adapters=store, keepalive_s=0.05)
    url, body = served.url + "/v1/completions", _body("ada", stream=True)
    async with served.http.post(url, json=body) as reply:
        assert reply.status == 200
        assert await reply.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        assert await reply.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        (store / "ada" / "adapter_model.safetensors").write_bytes(b"\x08broken")
        disk.set()
        raw = await reply.read()
    events = [event for event in raw.split(b"\n\n") if event.startswith(b"data:")]
    assert len(events) == 1
    assert orjson.loads(events[0].removeprefix(b"data: "))["error"]["code"] == "adapter_load_failed"


async def test_the_sdk_reads_past_comments(serve: Any, disk: threading.Event) -> None:
    served = await serve(keepalive_s=0.03)
    asyncio.get_running_loop().call_later(0.2, disk.set)
    stream = await served.sdk.completions.create(
        model="ada", prompt="once", max_tokens=12, temperature=0, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == await served.tokens("ada")


async def test_a_reader_that_is_slow_gets_everything(serve: Any) -> None:
    served = await serve()
    expected = await served.tokens("ada", tokens=300, ignore_eos=True)
    body = _body("ada", stream=True, tokens=300)
    text = ""
    async with (
        aiohttp.ClientSession(read_bufsize=256) as http,
        http.post(served.url + "/v1/completions", json=body) as reply,
    ):
        await asyncio.sleep(0.3)
        async for line in reply.content:
            if line.startswith(b"data: {"):
                choice = orjson.loads(line.removeprefix(b"data: "))["choices"][0]
                text += choice["text"]
    assert text == expected
