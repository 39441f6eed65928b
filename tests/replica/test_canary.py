"""A newcomer's first forward pass: what fails it never answers, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replica.canary import Canary

LOAD = "/v1/load_lora_adapter"


def spoil(store: Path, name: str, change: Callable[[str, Tensor], Tensor]) -> None:
    weights = store / name / "adapter_model.safetensors"
    save_file({key: change(key, each) for key, each in load_file(weights).items()}, weights)


def huge(_: str, half: Tensor) -> Tensor:
    """Finite, and more than any forward pass can take."""
    return torch.full_like(half, 1e30)


def crossed(name: str, half: Tensor) -> Tensor:
    """A lives in the first rank and B in the others: neither is zero, their product is."""
    kept = torch.zeros_like(half)
    if "lora_A" in name:
        kept[:1] = half[:1]
    else:
        kept[:, 1:] = half[:, 1:]
    return kept


@pytest.mark.parametrize(
    ("change", "code"), [(huge, "canary_not_finite"), (crossed, "canary_no_effect")]
)
async def test_what_fails_its_canary_is_refused_with_the_reason_and_harms_nobody(
    serve: Any, store: Path, change: Callable[[str, Tensor], Tensor], code: str
) -> None:
    spoil(store, "ada", change)
    served = await serve(adapters=store)
    expected = await served.tokens("bob"), await served.tokens("tiny")
    assert (await served.adapter("ada"))["state"] == "READY"
    for name in ("other", "ada"):
        status, reply = await served.post(LOAD, {"lora_name": name, "lora_path": "ada"})
        assert (status, reply["error"]["code"]) == (400, code)
    ada = await served.adapter("ada")
    assert (ada["state"], ada["canary"]) == ("FAILED", "failed")
    assert code in ada["reason"]
    assert (await served.post("/v1/completions", {"model": "other", "prompt": "x"}))[0] == 404
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert (await served.tokens("bob"), await served.tokens("tiny")) == expected
    await served.idle()


async def test_a_version_that_dies_on_trial_leaves_the_one_before_it_serving(
    serve: Any, store: Path
) -> None:
    spoil(store, "bob", huge)
    served = await serve(adapters=store)
    assert (await served.post(LOAD, {"lora_name": "x", "lora_path": "ada"}))[0] == 200
    before, expected = await served.adapter("x"), await served.tokens("x")
    body = {"lora_name": "x", "lora_path": "bob", "load_inplace": True}
    status, reply = await served.post(LOAD, body)
    assert (status, reply["error"]["code"]) == (400, "canary_not_finite")
    assert await served.adapter("x") == before
    assert await served.tokens("x") == expected
    names = [each["id"] for each in (await served.get("/v1/adapters"))[1]["data"]]
    assert not any("trial" in name for name in names)
    assert (await served.post(LOAD, body | {"lora_path": "cyd"}))[0] == 200
    assert await served.tokens("x") == await served.tokens("cyd")
    await served.idle()


async def test_a_request_that_comes_first_never_hears_from_what_fails(
    serve: Any, store: Path
) -> None:
    spoil(store, "ada", huge)
    served = await serve(adapters=store)
    status, reply = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert (status, reply["error"]["code"]) == (503, "adapter_load_failed")
    assert "canary_not_finite" in (await served.adapter("ada"))["reason"]


async def test_one_content_is_tried_once_whatever_it_is_called(
    serve: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights: list[int] = []
    fly = Canary._try

    def counted(canary: Canary, slot: int, pages: tuple[int, ...]) -> None:
        flights.append(slot)
        fly(canary, slot, pages)

    monkeypatch.setattr(Canary, "_try", counted)
    served = await serve(adapters=store)
    for name in ("one", "two"):
        assert (await served.post(LOAD, {"lora_name": name, "lora_path": "ada"}))[0] == 200
        assert (await served.adapter(name))["canary"] == "passed"
    assert await served.tokens("one") == await served.tokens("two") == await served.tokens("ada")
    assert len(flights) == 1


async def test_a_load_whose_slot_is_long_in_coming_is_answered_all_the_same(
    serve: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.front.CANARY_S", 0.1)
    served = await serve(adapters=store, max_loras=1)
    running = asyncio.ensure_future(served.tokens("ada", tokens=300, ignore_eos=True))
    await served.until(lambda: served.replica.front.report.running == 1)
    body = {"lora_name": "new", "lora_path": "bob"}
    assert (await asyncio.wait_for(served.post(LOAD, body), 5))[0] == 200
    assert await running
    await served.until(lambda: served.replica.engine.cache.slot_of("new") is not None)
    assert (await served.adapter("new"))["canary"] == "passed"
    await served.idle()


async def test_a_trial_ends_with_the_name_it_was_for(serve: Any, store: Path) -> None:
    served = await serve(adapters=store, max_loras=1)
    running = asyncio.ensure_future(served.tokens("ada", tokens=300, ignore_eos=True))
    await served.until(lambda: served.replica.front.report.running == 1)
    loading = asyncio.ensure_future(served.post(LOAD, {"lora_name": "new", "lora_path": "bob"}))
    await served.until(lambda: "new" in served.replica.front.adapters)
    assert (await served.post("/v1/unload_lora_adapter", {"lora_name": "new"}))[0] == 200
    status, reply = await asyncio.wait_for(loading, 5)
    assert (status, reply["error"]["code"]) == (400, "withdrawn")
    await running
    await served.idle()
