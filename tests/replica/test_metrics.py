"""Every declared metric moves, and none outlives what it describes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replica.engine.adapter_store import AdapterFolder, HostAdapter
from shared.clock import wall
from shared.ids import AdapterId


async def _scrape(served: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    async with served.http.get(served.url + "/metrics") as reply:
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = await reply.text()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _value(samples: dict[Any, float], name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def _info(samples: dict[Any, float]) -> dict[str, str]:
    [labels] = [labels for name, labels in samples if name == "vllm:lora_requests_info"]
    return dict(labels)


async def test_work_moves_what_counts_it(serve: Any) -> None:
    served = await serve(max_cpu_loras=2)
    before = await _scrape(served)
    for name in ("ada", "bob", "cyd", "bob", "ada"):
        await served.tokens(name, tokens=6, ignore_eos=True)
    after = await _scrape(served)

    def grew(name: str, **labels: str) -> float:
        name = f"loraplex_replica_{name}"
        return _value(after, name, **labels) - _value(before, name, **labels)

    assert grew("tokens_total", kind="decode") == 25
    assert grew("tokens_total", kind="prefill") == 5 * 4
    assert grew("step_seconds_count") == 30
    assert grew("step_seconds_sum") > 0
    assert grew("sequences_total", finish="length") == 5
    assert grew("adapter_load_seconds_count", tier="disk") == 4
    assert grew("adapter_load_seconds_sum", tier="disk") > 0
    assert grew("adapter_wait_seconds_count", tier="disk") == 4
    assert grew("adapter_wait_seconds_count", tier="gpu") == 1  # bob, again
    assert grew("adapter_wait_seconds_sum", tier="disk") >= grew(
        "adapter_load_seconds_sum", tier="disk"
    )
    assert grew("adapter_wait_seconds_sum", tier="gpu") == 0
    assert grew("adapter_evictions_total", tier="gpu") == 2
    assert grew("adapter_evictions_total", tier="host") == 2
    await served.idle()
    now = await _scrape(served)
    assert _value(now, "loraplex_replica_slots") == 2
    assert _value(now, "loraplex_replica_slots_used") == 2
    assert _value(now, "loraplex_replica_adapters", status="ready") == 6


async def test_a_load_from_host_memory_is_told_from_one_from_disk(serve: Any) -> None:
    served = await serve()
    for name in ("ada", "bob", "cyd", "ada"):
        await served.tokens(name)
    samples = await _scrape(served)
    name = "loraplex_replica_adapter_load_seconds_count"
    assert _value(samples, name, tier="disk") == 3
    assert _value(samples, name, tier="host") == 1


async def test_what_is_brought_ahead_is_counted_and_then_waited_for_less(serve: Any) -> None:
    served = await serve()
    name = "loraplex_replica_adapter_prefetches_total"
    front = served.replica.front

    def tiers() -> list[str]:
        states = [front.adapters[one] for one in ("ada", "bob")]
        return [f"{state.tier} {state.status}" for state in states]

    await served.post("/prefetch", {"adapters": ["ada", "bob"], "tier": "host"})
    await served.until(lambda: tiers() == ["host ready", "host ready"])
    await served.post("/prefetch", {"adapters": ["ada"], "tier": "gpu"})
    await served.until(lambda: tiers() == ["gpu ready", "host ready"])
    samples = await _scrape(served)
    assert (_value(samples, name, tier="host"), _value(samples, name, tier="gpu")) == (2, 1)
    for adapter in ("ada", "bob"):
        await served.tokens(adapter)
    samples = await _scrape(served)
    waits = "loraplex_replica_adapter_wait_seconds_count"
    assert [_value(samples, waits, tier=tier) for tier in ("gpu", "host", "disk")] == [1, 1, 0]


async def test_what_runs_and_waits_shows_and_goes(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = threading.Event(), AdapterFolder.read

    def gated(folder: AdapterFolder, adapter: AdapterId) -> HostAdapter:
        if adapter == "bob":
            gate.wait(20)
        return read(folder, adapter)

    monkeypatch.setattr(AdapterFolder, "read", gated)
    served = await serve(report_interval_s=0.01)
    await served.tokens("ada")
    running = asyncio.ensure_future(served.tokens("ada", tokens=2000, ignore_eos=True))
    waiting = asyncio.ensure_future(served.tokens("bob"))
    front = served.replica.front
    await served.until(lambda: front.report.running == 1 and front.report.waiting == 1)
    samples = await _scrape(served)
    assert _value(samples, "vllm:num_requests_running", model_name="tiny") == 1
    assert _value(samples, "vllm:num_requests_waiting", model_name="tiny") == 1
    await served.until(lambda: front.report.pages_free < front.report.pages_total)
    samples = await _scrape(served)
    assert 0 < _value(samples, "vllm:kv_cache_usage_perc", model_name="tiny") < 1
    assert _info(samples) == {
        "max_lora": "2",
        "running_lora_adapters": "ada",
        "waiting_lora_adapters": "bob",
    }
    assert _value(samples, "loraplex_replica_adapters", status="loading") == 1
    gate.set()
    await waiting
    running.cancel()
    await served.idle()
    samples = await _scrape(served)
    assert _info(samples)["running_lora_adapters"] == ""
    assert _info(samples)["waiting_lora_adapters"] == ""
    assert _value(samples, "vllm:kv_cache_usage_perc", model_name="tiny") == 0
    await served.post("/pin", {"adapter": "ada"})
    assert _value(await _scrape(served), "loraplex_replica_adapters_pinned") == 1


async def test_an_endpoint_picker_finds_what_the_model_server_protocol_demands(serve: Any) -> None:
    """Gateway API Inference Extension, docs/proposals/003-model-server-protocol: gauges by vLLM's
    names, `cache_config_info` with its two labels, LoRA with its three and a timestamp."""
    served = await serve()
    await served.tokens("ada")
    began = wall()
    async with served.http.get(served.url + "/metrics") as reply:
        families = {f.name: f for f in text_string_to_metric_families(await reply.text())}
    for name in (
        "vllm:num_requests_waiting",  # TotalQueuedRequests
        "vllm:num_requests_running",  # TotalRunningRequests
        "vllm:kv_cache_usage_perc",  # KVCacheUtilization: 1 is all of it
        "vllm:cache_config_info",  # BlockSize, NumGPUBlocks
        "vllm:lora_requests_info",
    ):
        assert families[name].type == "gauge"
        [sample] = families[name].samples  # one: no picker has to choose between series
        assert sample.value >= 0
    [cache] = families["vllm:cache_config_info"].samples
    pool = served.replica.engine.pool
    assert cache.labels == {"block_size": "16", "num_gpu_blocks": str(pool.pages)}
    [lora] = families["vllm:lora_requests_info"].samples
    assert lora.labels.keys() == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
    assert int(lora.labels["max_lora"]) == served.replica.front.report.slots
    assert abs(lora.value - began) < 60, "the time at which it was so"


async def test_pages_are_counted_by_what_holds_them(serve: Any) -> None:
    served = await serve(report_interval_s=0.01)
    pool, cache = served.replica.engine.pool, served.replica.engine.cache

    async def pages() -> dict[str, float]:
        samples = await _scrape(served)
        uses = ("kv", "cached", "adapter", "free")
        return {use: _value(samples, "loraplex_replica_pages", use=use) for use in uses}

    assert await pages() == {"kv": 0, "cached": 0, "adapter": 0, "free": pool.pages}
    prompt = "a prompt of several pages, " * 4
    running = asyncio.ensure_future(served.tokens("ada", prompt, 2000, ignore_eos=True))
    front = served.replica.front
    await served.until(lambda: front.report.running == 1 and front.report.pages_adapters > 0)
    await served.until(lambda: front.report.pages_free < pool.pages - front.report.pages_adapters)
    during = await pages()
    assert during["kv"] > 0
    assert during["adapter"] == cache.pages_used > 0
    assert sum(during.values()) == pool.pages
    running.cancel()
    await served.idle()
    await served.until(lambda: front.report.pages_cached == pool.cached > 0)
    after = await pages()
    assert (after["kv"], after["cached"], after["adapter"]) == (0, pool.cached, cache.pages_used)
    name = "loraplex_replica_cached_prompt_tokens_total"
    before = _value(await _scrape(served), name)
    await served.tokens("ada", prompt)
    assert _value(await _scrape(served), name) - before >= 96
    await served.post("/v1/unload_lora_adapter", {"lora_name": "ada"})
    assert (await pages())["adapter"] == 0
