"""Load, unload, pin, prefetch, drain: what vLLM's controllers and our gateway call."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


async def test_a_folder_is_served_under_another_name(serve: Any, store: Path) -> None:
    served = await serve(adapters=store)
    name = "team/ada:v1"
    status, text = await served.post(LOAD, {"lora_name": name, "lora_path": str(store / "ada")})
    assert (status, text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    assert await served.tokens(name) == await served.tokens("ada")
    for path in (name, name.replace("/", "%2F")):
        status, model = await served.get(f"/v1/models/{path}")
        assert (status, model["id"], model["parent"]) == (200, name, "tiny")
    assert (await served.adapter(name))["digest"] == (await served.adapter("ada"))["digest"]


async def test_loading_twice_is_refused_unless_in_place(serve: Any, store: Path) -> None:
    served = await serve(adapters=store)
    body = {"lora_name": "ada", "lora_path": "ada"}
    assert (await served.post(LOAD, body))[0] == 200  # known from its folder, not by a call
    ada = await served.adapter("ada")
    assert (ada["tier"], ada["canary"]) == ("gpu", "passed")
    assert (await served.adapter("bob"))["canary"] == "pending"
    status, reply = await served.post(LOAD, body)
    assert (status, reply["error"]["code"]) == (400, "already_loaded")
    assert (await served.post(LOAD, {**body, "load_inplace": True}))[0] == 200


async def test_unloaded_is_gone_and_stays_gone(serve: Any, store: Path) -> None:
    served = await serve(adapters=store, rescan_s=0.05)
    await served.tokens("ada")
    await served.until(lambda: served.replica.front.adapters["ada"].tier == "gpu")
    status, text = await served.post(UNLOAD, {"lora_name": "ada"})
    assert (status, text) == (200, "Success: LoRA adapter 'ada' removed successfully.")
    assert served.replica.engine.cache.slots_used == 0
    assert served.replica.engine.cache.host_used == 0
    await asyncio.sleep(0.2)
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    status, reply = await served.post(UNLOAD, {"lora_name": "ada"})
    assert (status, reply["error"]["code"]) == (404, "adapter_not_found")
    assert (await served.post(UNLOAD, {"lora_name": "tiny"}))[0] == 404
    assert (await served.post(LOAD, {"lora_name": "ada", "lora_path": "ada"}))[0] == 200
    await served.tokens("ada")


async def test_unloading_lets_a_running_stream_finish_on_its_adapter(
    serve: Any, store: Path
) -> None:
    served = await serve(adapters=store)
    expected = await served.tokens("ada", tokens=150, ignore_eos=True)
    stream = await served.sdk.completions.create(
        model="ada",
        prompt="once",
        max_tokens=150,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = (await anext(stream)).choices[0].text
    assert (await served.post(UNLOAD, {"lora_name": "ada"}))[0] == 200
    async for chunk in stream:
        text += chunk.choices[0].text
    assert text == expected
    await served.until(lambda: served.replica.engine.cache.slots_used == 0)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("nothing-here", 404, "adapter_not_found"),
        ("org/hub-name", 404, "adapter_not_found"),
        (".", 404, "adapter_not_found"),
        ("x" * 300, 404, "adapter_not_found"),
        ("a\0b", 404, "adapter_not_found"),
        ("../base", 400, "outside_root"),
        ("/etc", 400, "outside_root"),
        ("link", 400, "outside_root"),
    ],
)
async def test_only_folders_of_the_store_are_loaded(
    serve: Any, store: Path, tiny: Path, path: str, status: int, code: str
) -> None:
    (store / "link").symlink_to(tiny / "base")
    served = await serve(adapters=store)
    got, reply = await served.post(LOAD, {"lora_name": "x", "lora_path": path})
    assert (got, reply["error"]["code"], reply["error"]["param"]) == (status, code, "lora_path")


@pytest.mark.parametrize("name", ["", "a,b", "../x", "a//b", "/a", "a\nb", "x" * 300, None, 3])
async def test_names_that_cannot_be_served_are_refused(serve: Any, name: Any) -> None:
    served = await serve()
    status, reply = await served.post(LOAD, {"lora_name": name, "lora_path": "ada"})
    assert (status, reply["error"]["param"]) == (400, "lora_name")


async def test_load_and_unload_answer_as_vllms_do(serve: Any, store: Path) -> None:
    """Status, type and the words that controllers look for, from transcripts of vLLM 0.32."""
    served = await serve(adapters=store)

    async def said(path: str, body: dict[str, Any]) -> tuple[int, str, str]:
        status, reply = await served.post(path, body)
        if isinstance(reply, str):
            return status, "", reply
        return status, reply["error"]["type"], reply["error"]["message"]

    load = {"lora_name": "probe", "lora_path": str(store / "ada"), "base_model_name": None}
    assert await said(LOAD, load) == (
        200, "", "Success: LoRA adapter 'probe' added successfully.",
    )  # fmt: skip
    assert await said(LOAD, load) == (
        400, "InvalidUserInput",
        "The lora adapter 'probe' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True.",
    )  # fmt: skip
    assert (await said(LOAD, {**load, "load_inplace": True}))[0] == 200
    status, kind, text = await said(LOAD, {**load, "lora_name": "x", "lora_path": "org/hub-id"})
    assert (status, kind) == (404, "NotFoundError")
    assert text.startswith("Loading lora x failed: No adapter found for org/hub-id")
    status, kind, text = await said(LOAD, {**load, "lora_name": "tiny"})
    assert (status, kind) == (400, "InvalidUserInput")
    assert "conflicts with a served base model" in text
    unload = {"lora_name": "probe", "lora_int_id": None}
    assert await said(UNLOAD, unload) == (
        200, "", "Success: LoRA adapter 'probe' removed successfully.",
    )  # fmt: skip
    assert await said(UNLOAD, unload) == (
        404, "NotFoundError", "The lora adapter 'probe' cannot be found.",
    )  # fmt: skip


async def test_the_name_of_the_base_is_taken(serve: Any) -> None:
    served = await serve()
    status, reply = await served.post(LOAD, {"lora_name": "tiny", "lora_path": "ada"})
    assert (status, reply["error"]["code"]) == (400, "name_conflict")


async def test_a_bad_adapter_is_refused_with_the_reason_and_harms_nobody(
    serve: Any, store: Path
) -> None:
    config = json.loads((store / "bob" / "adapter_config.json").read_text())
    (store / "bob" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    (store / "cyd" / "adapter_model.safetensors").write_bytes(b"\x08")
    served = await serve(adapters=store, max_lora_rank=6)
    for name, code in (("bob", "unsupported_feature:use_dora"), ("eve", "rank_exceeds_max")):
        status, reply = await served.post(LOAD, {"lora_name": "x", "lora_path": name})
        assert (status, reply["error"]["code"]) == (400, code)
        assert (await served.adapter(name))["state"] == "FAILED"
        assert code in (await served.adapter(name))["reason"]
        status, reply = await served.post("/v1/completions", {"model": name, "prompt": "x"})
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert "dora" not in reply["error"]["message"]
    assert (await served.post(LOAD, {"lora_name": "x", "lora_path": "cyd"}))[0] == 400
    listed = [model["id"] for model in (await served.get("/v1/models"))[1]["data"]]
    assert listed == ["tiny", "ada", "dee", "fay"]
    await served.tokens("ada")


async def test_new_weights_under_a_name_never_answer_with_the_old(serve: Any, store: Path) -> None:
    served = await serve(adapters=store)
    reference = {name: await served.tokens(name) for name in ("ada", "bob", "cyd")}
    for name in ("bob", "cyd"):
        shutil.rmtree(store / "ada")
        shutil.copytree(store / name, store / "ada")
        body = {"lora_name": "ada", "lora_path": "ada", "load_inplace": True}
        assert (await served.post(LOAD, body))[0] == 200
        assert await served.tokens("ada") == reference[name]
        assert (await served.adapter("ada"))["digest"] == (await served.adapter(name))["digest"]


async def test_a_running_stream_keeps_its_version_while_new_requests_get_the_new(
    serve: Any, store: Path
) -> None:
    served = await serve(adapters=store)
    old = await served.tokens("ada", tokens=120, ignore_eos=True)
    new = await served.tokens("bob")
    stream = await served.sdk.completions.create(
        model="ada",
        prompt="once",
        max_tokens=120,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    first = await anext(stream)
    shutil.rmtree(store / "ada")
    shutil.copytree(store / "bob", store / "ada")
    body = {"lora_name": "ada", "lora_path": "ada", "load_inplace": True}
    assert (await served.post(LOAD, body))[0] == 200
    assert await served.tokens("ada") == new
    chunks = [first] + [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == old
    assert len({chunk.system_fingerprint for chunk in chunks}) == 1


async def test_a_pinned_adapter_stays_in_its_slot(serve: Any) -> None:
    served = await serve()
    status, state = await served.post("/pin", {"adapter": "ada"})
    assert (status, state["pinned"]) == (200, True)
    async with asyncio.timeout(10):
        while (await served.adapter("ada"))["tier"] != "gpu":  # noqa: ASYNC110 (its load is under way)
            await asyncio.sleep(0.01)
    for name in ("bob", "cyd", "dee"):
        await served.tokens(name)
    assert (await served.adapter("ada"))["tier"] == "gpu"
    status, reply = await served.post("/pin", {"adapter": "bob"})
    assert (status, reply["error"]["code"]) == (400, "cannot_pin")
    assert (await served.post("/pin", {"adapter": "ada", "pinned": False}))[1]["pinned"] is False
    assert (await served.post("/pin", {"adapter": "nobody"}))[0] == 404


async def test_a_load_that_asks_for_a_pin_it_cannot_have_leaves_nothing(serve: Any) -> None:
    served = await serve()
    body = {"lora_path": "ada", "pinned": True}
    assert (await served.post(LOAD, {"lora_name": "x", **body}))[0] == 200
    status, reply = await served.post(LOAD, {"lora_name": "y", **body})
    assert (status, reply["error"]["code"]) == (400, "cannot_pin")
    assert (await served.get("/v1/models/y"))[0] == 404


async def test_prefetched_adapters_reach_host_memory(serve: Any) -> None:
    served = await serve(max_cpu_loras=3)
    status, _ = await served.post("/prefetch", {"adapters": ["ada", "bob", "ada"]})
    assert status == 202
    cache = served.replica.engine.cache
    await served.until(lambda: cache.host_used == 2)
    await served.until(
        lambda: all(served.replica.front.adapters[n].tier == "host" for n in ("ada", "bob"))
    )
    status, reply = await served.post("/prefetch", {"adapters": ["cyd", "nobody"]})
    assert (status, reply["error"]["code"]) == (404, "adapter_not_found")
    assert (await served.post("/prefetch", {"adapters": list("abcdef")[:0]}))[0] == 400
    await served.post("/prefetch", {"adapters": ["cyd", "dee", "eve", "fay"]})
    await served.until(lambda: cache.host_used == 3)


async def test_changes_need_the_fleet_token_and_reading_does_not(serve: Any) -> None:
    served = await serve(fleet_token="s3cret")
    calls: list[tuple[str, dict[str, Any]]] = [
        (LOAD, {"lora_name": "x", "lora_path": "ada"}),
        (UNLOAD, {"lora_name": "x"}),
        ("/pin", {"adapter": "ada"}),
        ("/prefetch", {"adapters": ["ada"]}),
        ("/drain", {"draining": False}),
    ]
    for path, body in calls:
        for headers in ({}, {"x-loraplex-fleet-token": "wrong"}, {"Authorization": "Bearer no"}):
            status, reply = await served.post(path, body, **headers)
            assert (status, reply["error"]["code"]) == (401, "fleet_token_required")
        assert (await served.post(path, body, **{"x-loraplex-fleet-token": "s3cret"}))[0] < 300
    headers = {"Authorization": "Bearer s3cret"}
    assert (await served.post("/pin", {"adapter": "ada"}, **headers))[0] == 200
    for path in ("/v1/models", "/v1/adapters", "/health", "/metrics"):
        assert (await served.get(path))[0] == 200


async def test_a_draining_replica_says_so_and_takes_nothing_new(serve: Any) -> None:
    served = await serve()
    running = asyncio.ensure_future(served.tokens("ada", tokens=200, ignore_eos=True))
    await served.until(lambda: served.replica.front.report.running == 1)
    status, reply = await served.post("/drain", {})
    assert (status, reply["draining"]) == (200, True)
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (503, "draining")
    await served.until(lambda: served.replica.front.report.draining)
    assert (await served.get("/health"))[1]["status"] == "draining"
    assert await running
    await served.post("/drain", {"draining": False})
    await served.tokens("ada")
    await served.until(lambda: not served.replica.front.report.draining)


async def test_a_store_that_changes_is_noticed(serve: Any, store: Path) -> None:
    served = await serve(adapters=store, rescan_s=0.05)
    shutil.copytree(store / "ada", store / "new")
    await served.until(lambda: served.replica.front.servable("new"))
    assert await served.tokens("new") == await served.tokens("ada")
    shutil.rmtree(store / "new")
    await served.until(lambda: not served.replica.front.servable("new"))
    assert (await served.post("/v1/completions", {"model": "new", "prompt": "x"}))[0] == 404
    assert (await served.get("/v1/models/new"))[0] == 404


async def test_a_request_for_a_folder_that_just_came_finds_it(serve: Any, store: Path) -> None:
    served = await serve(adapters=store)
    shutil.copytree(store / "ada", store / "new")
    await asyncio.sleep(1.1)  # the store is looked through at most once a second
    assert await served.tokens("new") == await served.tokens("ada")


async def test_a_broken_adapter_that_is_mended_is_served(serve: Any, store: Path) -> None:
    weights = store / "ada" / "adapter_model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[: len(good) // 2])
    served = await serve(adapters=store, rescan_s=0.05)
    assert (await served.adapter("ada"))["state"] == "FAILED"
    weights.write_bytes(good)
    await served.until(lambda: served.replica.front.servable("ada"))
    await served.tokens("ada")


async def test_weights_that_are_not_finite_are_refused(serve: Any, store: Path) -> None:
    weights = store / "ada" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(iter(tensors))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, weights)
    served = await serve(adapters=store)
    assert "non_finite" in (await served.adapter("ada"))["reason"]


async def test_a_load_may_insist_on_a_digest(serve: Any, store: Path) -> None:
    served = await serve(adapters=store)
    digest = (await served.adapter("ada"))["digest"]
    body = {"lora_name": "x", "lora_path": "ada"}
    status, reply = await served.post(LOAD, {**body, "digest": "0" * 64})
    assert (status, reply["error"]["code"]) == (400, "digest_mismatch")
    assert (await served.get("/v1/models/x"))[0] == 404
    assert (await served.post(LOAD, {**body, "digest": digest}))[0] == 200


async def test_adapters_are_warmed_into_free_slots_and_none_is_emptied_for_it(serve: Any) -> None:
    served = await serve()
    cache, slots = served.replica.engine.cache, served.replica.front.report.slots
    body = {"adapters": ["ada", "bob", "cyd", "dee"], "tier": "gpu"}
    assert (await served.post("/prefetch", body))[0] == 202

    def places() -> dict[str, int | None]:
        return {name: cache.slot_of(name) for name in body["adapters"]}

    await served.until(lambda: sum(at is not None for at in places().values()) == slots)
    held = places()
    await served.post("/prefetch", {"adapters": ["eve"], "tier": "gpu"})
    assert places() == held
    assert cache.slot_of("eve") is None
    assert await served.tokens("eve")  # nobody holds what was only warmed
