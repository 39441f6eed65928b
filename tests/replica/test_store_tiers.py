"""A replica whose adapters lie in an object store: cold ones come, and nobody waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cutting_proxy import CuttingProxy, cutting_proxy
from s3_server import BUCKET, S3Server, options
from uploads import edit_config

LOAD = "/v1/load_lora_adapter"


@pytest.fixture
def prefix(s3: S3Server, store: Path, request: pytest.FixtureRequest) -> str:
    name = str(request.node.name[:40])
    for folder in ("ada", "bob", "cyd"):
        s3.put(store / folder, f"{name}/{folder}")
    return name


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[CuttingProxy]:
    with cutting_proxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def far(serve: Any, tmp_path: Path, proxy: CuttingProxy, prefix: str) -> Any:
    """Start a replica on the store."""

    async def start(**settings: Any) -> Any:
        (tmp_path / "cache").mkdir(exist_ok=True)
        served = await serve(
            adapters=tmp_path / "cache",
            adapter_store=f"s3://{BUCKET}/{prefix}",
            adapter_store_options=options(proxy.endpoint),
            rescan_s=0.05,
            **settings,
        )
        names = {"ada", "bob", "cyd"}
        await served.until(lambda: names <= served.replica.front.adapters.keys())
        return served

    return start


def drop_cache(served: Any) -> None:
    """As if the disk had been needed for others."""
    cache = served.replica._source._cache
    for key in list(cache._sizes):
        cache.remove(key)


async def test_adapters_of_a_store_answer_as_those_of_a_folder(far: Any, serve: Any) -> None:
    near, served = await serve(), await far()
    for name in ("ada", "bob", "cyd"):
        assert await served.tokens(name) == await near.tokens(name)
        assert (await served.adapter(name))["digest"] == (await near.adapter(name))["digest"]
    await served.until(lambda: served.replica.front.report.read_bytes_per_s > 0)
    assert served.replica.front.report.copy_bytes_per_s > 0


async def test_a_dead_store_delays_nobody_whose_adapter_is_here(
    far: Any, proxy: CuttingProxy
) -> None:
    served = await far(max_loras=1)
    expected = await served.tokens("ada")
    await served.tokens("bob")
    drop_cache(served)
    proxy.dead = True
    cold = asyncio.ensure_future(
        served.post("/v1/completions", {"model": "cyd", "prompt": "x", "max_tokens": 2})
    )
    await served.until(lambda: served.replica.front.report.waiting == 1)
    begun = time.monotonic()
    for _ in range(5):  # of host memory, through the only slot
        assert await served.tokens("ada") == expected
        await served.tokens("bob")
        await served.tokens("tiny")
    assert time.monotonic() - begun < 5
    assert not cold.done()
    proxy.dead = False
    cold.cancel()
    await asyncio.gather(cold, return_exceptions=True)
    await served.idle()


async def test_a_cold_adapter_comes_from_the_store_and_the_rate_is_told(
    far: Any, proxy: CuttingProxy
) -> None:
    served = await far()
    drop_cache(served)
    assert await served.tokens("ada")
    await served.until(lambda: served.replica.front.report.fetch_bytes_per_s > 0)
    drop_cache(served)
    await served.post("/prefetch", {"adapters": ["cyd"]})
    await served.until(lambda: served.replica.front.adapters["cyd"].tier == "host")


async def test_a_store_that_fails_is_said_to_who_waits_and_tried_again_later(
    far: Any, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.adapters.RETRY_S", 0.5)
    monkeypatch.setattr("replica.object_store._VAIN_MAX", 1)
    served = await far()
    drop_cache(served)
    proxy.refuses = b"/ada/"
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (503, "adapter_load_failed")
    assert "unreachable" in (await served.adapter("ada"))["reason"]
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (503, "adapter_load_failed"), "it is not unknown"
    assert await served.tokens("bob")
    proxy.refuses = None
    await served.until(lambda: served.replica.front.servable("ada"))
    assert await served.tokens("ada")


async def test_a_load_call_names_what_was_just_uploaded(
    far: Any, s3: S3Server, store: Path, prefix: str
) -> None:
    served = await far()
    s3.put(store / "dee", f"{prefix}/new")
    edit_config(store / "eve", {"use_dora": True})
    s3.put(store / "eve", f"{prefix}/dora")
    url = f"s3://{BUCKET}/{prefix}"
    assert (await served.post(LOAD, {"lora_name": "a", "lora_path": f"{url}/new"}))[0] == 200
    assert (await served.post(LOAD, {"lora_name": "b", "lora_path": "new"}))[0] == 200
    assert await served.tokens("a") == await served.tokens("b")
    for path, status, code in (
        ("nobody", 404, "adapter_not_found"),
        (f"s3://{BUCKET}/elsewhere/new", 400, "outside_root"),
        ("../new", 400, "outside_root"),
        ("dora", 400, "unsupported_feature:use_dora"),
    ):
        got, reply = await served.post(LOAD, {"lora_name": "x", "lora_path": path})
        assert (got, reply["error"]["code"]) == (status, code)
