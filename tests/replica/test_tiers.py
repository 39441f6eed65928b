"""Weights on their way: read once however many want them, and never in the way of who waits."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from replica.engine.adapter_store import AdapterFolder, HostAdapter
from replica.engine.runner import Runner
from shared.ids import AdapterId


class Disk:
    """Counts reads; those of `held` adapters wait until `let_go`."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.held: set[str] = set()
        self._gate = threading.Event()

    def wait(self, adapter: AdapterId) -> None:
        self.reads[adapter] += 1
        if adapter in self.held:
            self._gate.wait(20)

    def let_go(self) -> None:
        self._gate.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk, read = Disk(), AdapterFolder.read

    def watched(folder: AdapterFolder, adapter: AdapterId) -> HostAdapter:
        disk.wait(adapter)
        return read(folder, adapter)

    monkeypatch.setattr(AdapterFolder, "read", watched)
    return disk


async def test_an_adapter_is_read_once_for_all_that_wait_for_it(serve: Any, disk: Disk) -> None:
    disk.held = {"ada"}
    served = await serve()
    await served.post("/prefetch", {"adapters": ["ada"]})
    await served.until(lambda: disk.reads["ada"] == 1)
    waiting = [asyncio.ensure_future(served.tokens("ada")) for _ in range(5)]
    await served.until(lambda: served.replica.front.report.waiting == 5)
    disk.let_go()
    assert len(set(await asyncio.gather(*waiting))) == 1
    assert disk.reads["ada"] == 1


async def test_fetching_ahead_does_not_stand_before_a_request(serve: Any, disk: Disk) -> None:
    disk.held = {"ada"}
    served = await serve()
    await served.post("/prefetch", {"adapters": ["ada", "bob", "cyd", "dee"]})
    await served.until(lambda: disk.reads["ada"] == 1)
    assert await asyncio.wait_for(served.tokens("eve"), 5)
    assert disk.reads["bob"] == 0
    disk.let_go()
    await served.until(lambda: served.replica.engine.cache.host_used == 5)
    assert dict(disk.reads) == dict.fromkeys(["ada", "bob", "cyd", "dee", "eve"], 1)


async def test_a_copy_that_does_not_fit_its_slot_fails_its_adapter_alone(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Runner.load

    def refuse(runner: Runner, slot: int, host: HostAdapter, pages: Sequence[int]) -> None:
        if host.adapter == "ada":
            raise RuntimeError("out of memory")
        load(runner, slot, host, pages)

    monkeypatch.setattr(Runner, "load", refuse)
    served = await serve()
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (503, "adapter_load_failed")
    assert "out of memory" in (await served.adapter("ada"))["reason"]
    assert await served.tokens("bob")


async def test_an_adapter_withdrawn_while_it_loads_never_answers(
    serve: Any, store: Path, disk: Disk
) -> None:
    disk.held = {"ada"}
    served = await serve(adapters=store)
    waiting = asyncio.ensure_future(
        served.post("/v1/completions", {"model": "ada", "prompt": "x", "max_tokens": 2})
    )
    await served.until(lambda: served.replica.front.report.waiting == 1)
    assert (await served.post("/v1/unload_lora_adapter", {"lora_name": "ada"}))[0] == 200
    status, reply = await waiting
    assert (status, reply["error"]["code"]) == (503, "adapter_load_failed")
    disk.let_go()
    cache = served.replica.engine.cache
    await served.until(lambda: cache.slots_used == 0 and cache.host_used == 0)


async def test_two_names_of_one_content_share_their_bytes(
    serve: Any, store: Path, disk: Disk
) -> None:
    served = await serve(adapters=store)
    await served.tokens("ada")
    body = {"lora_name": "twin", "lora_path": "ada"}
    assert (await served.post("/v1/load_lora_adapter", body))[0] == 200
    cache = served.replica.engine.cache
    await served.tokens("twin")
    assert cache.host_used == 2
    assert cache.host_bytes == served.replica.front.adapters["ada"].size_bytes
    assert (await served.post("/v1/unload_lora_adapter", {"lora_name": "ada"}))[0] == 200
    assert await served.tokens("twin")
    assert (await served.post("/v1/unload_lora_adapter", {"lora_name": "twin"}))[0] == 200
    assert (cache.host_used, cache.host_bytes, cache.slots_used) == (0, 0, 0)


async def test_host_memory_keeps_to_its_bytes_and_the_report_tells(serve: Any) -> None:
    sizes = {name: state["bytes"] for name, state in (await _states(await serve())).items()}
    budget = sizes["ada"] + sizes["bob"] + sizes["cyd"]
    served = await serve(host_bytes=budget)
    for name in ("ada", "bob", "cyd", "dee", "eve", "fay", "ada"):
        await served.tokens(name)
        cache = served.replica.engine.cache
        cache.check()
        assert cache.host_bytes <= budget
    await served.until(lambda: served.replica.front.report.host_bytes_used == cache.host_bytes)
    metrics = (await served.get("/metrics"))[1]
    assert f"loraplex_replica_host_bytes_used {float(cache.host_bytes)}" in metrics
    assert served.replica.front.report.host_bytes == budget
    small = await serve(host_bytes=sizes["cyd"] - 1)
    assert "host_bytes" in (await small.adapter("cyd"))["reason"]
    assert await small.tokens("ada")


async def test_who_waits_for_a_slot_is_read_meanwhile(serve: Any, disk: Disk) -> None:
    served = await serve(max_loras=1)
    running = asyncio.ensure_future(served.tokens("ada", tokens=400, ignore_eos=True))
    await served.until(lambda: served.replica.front.report.running == 1)
    waiting = [asyncio.ensure_future(served.tokens(name)) for name in ("bob", "cyd")]
    await served.until(lambda: served.replica.engine.cache.host_used == 3)
    assert not running.done()
    await asyncio.gather(running, *waiting)
    assert dict(disk.reads) == {"ada": 1, "bob": 1, "cyd": 1}


async def _states(served: Any) -> dict[str, Any]:
    return {state["name"]: state for state in (await served.get("/v1/adapters"))[1]["data"]}
