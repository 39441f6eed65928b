"""Two faults that were seen on a real peer, as tests (and what is near them): a row without adapter
that got the last slot's, and one adapter of NaN that broke every model until a restart."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from shared.ids import AdapterId

PROMPTS = ["once upon a time", "the adapter in the last slot", "x"]


async def _together(served: Any, models: list[str], tokens: int = 24) -> list[str]:
    asks = (
        served.tokens(model, prompt, tokens, ignore_eos=True)
        for prompt in PROMPTS
        for model in models
    )
    return list(await asyncio.gather(*asks))


async def test_a_row_without_adapter_gets_none_in_every_mix(serve: Any) -> None:
    """With no adapter resident; with all slots full and idle; between rows of adapters."""
    served = await serve(max_loras=3, max_running=16)
    [*alone] = await _together(served, ["tiny"])
    texts = {}
    for adapter in ("ada", "bob", "cyd"):
        texts[adapter] = await _together(served, [adapter])
        assert texts[adapter] != alone, "the adapter matters"
    assert served.replica.engine.cache.slots_used == 3, "the last slot too"
    assert await _together(served, ["tiny"]) == alone
    for mix in (["tiny", "cyd", "tiny"], ["ada", "tiny", "bob"], ["cyd", "tiny", "ada", "bob"]):
        together = await _together(served, mix)
        for at, model in enumerate(mix):
            mine = together[at :: len(mix)]
            assert mine == (alone if model == "tiny" else texts[model])


async def test_an_adapter_whose_weights_became_nan_harms_nobody_else(serve: Any) -> None:
    """The store and the load refuse such weights; these rot in the pool. It is small, so that their
    pages soon are others' pages, and their slot another's."""
    calm = await serve()
    models = ["tiny", "bob", "cyd", "dee"]
    expected = [await _together(calm, [model]) for model in models]
    good = await _together(calm, ["ada"])
    served = await serve(max_loras=2, max_running=4, pages=28, max_model_len=96)
    engine = served.replica.engine
    await served.post("/pin", {"adapter": "ada"})
    assert await served.tokens("ada")
    await served.idle()
    slot = engine.cache.slot_of(AdapterId("ada"))
    engine.runner._arena.pool[list(engine.cache.pages_in(slot))] = math.nan
    body = {"model": "ada", "prompt": PROMPTS[0], "max_tokens": 24}
    for _ in range(3):
        (status, reply), others = await asyncio.gather(
            served.post("/v1/completions", body), _together(served, models)
        )
        assert (status, reply["error"]["code"]) == (500, "generation_failed")
        assert [others[at :: len(models)] for at in range(len(models))] == expected
        assert (await served.get("/health"))[1]["status"] == "ok", "it serves, and says so"
    await served.idle()
    await served.post("/v1/unload_lora_adapter", {"lora_name": "ada"})
    assert await _together(served, models[:1]) == expected[0], "in the pages that it had"
    await served.post("/v1/load_lora_adapter", {"lora_name": "ada", "lora_path": "ada"})
    assert await _together(served, ["ada"]) == good, "nothing of the rot was cached"
    again = await _together(served, models)
    assert [again[at :: len(models)] for at in range(len(models))] == expected


async def test_weights_that_are_not_finite_are_refused_and_the_rest_is_served(
    serve: Any, store: Path
) -> None:
    weights = store / "ada" / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0, 0] = math.nan
    save_file(tensors, weights)
    served = await serve(adapters=store)
    state = await served.adapter("ada")
    assert (state["state"], state["reason"].split(":")[0]) == ("FAILED", "non_finite")
    status, _ = await served.post("/v1/completions", {"model": "ada", "prompt": "x"})
    assert status == 404
    assert await served.tokens("bob")


async def test_new_weights_under_a_name_answer_from_no_old_page(serve: Any, store: Path) -> None:
    served = await serve(adapters=store)
    prompt = "a prompt of several pages, " * 4
    old = await served.tokens("ada", prompt)
    assert await served.tokens("ada", prompt) == old, "from cached pages"
    weights = store / "ada" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file(
        {name: -each for name, each in tensors.items() if "A" in name}
        | {name: 2 * each for name, each in tensors.items() if "A" not in name},
        weights,
    )
    body = {"lora_name": "ada", "lora_path": "ada", "load_inplace": True}
    status, reply = await served.post("/v1/load_lora_adapter", body)
    assert status == 200, reply
    calm = await serve(adapters=store)
    new = await calm.tokens("ada", prompt)
    assert new != old
    assert await served.tokens("ada", prompt) == new


async def test_a_salt_is_the_fleets_to_give_and_divides_the_cache(serve: Any) -> None:
    served = await serve(fleet_token="fleet")
    body = {"model": "tiny", "prompt": "a prompt of several pages, " * 4, "max_tokens": 1}

    async def cached(salt: str = "", token: str = "fleet") -> tuple[int, int]:
        salted = {"x-loraplex-cache-salt": salt} if salt else {}
        headers = {"x-loraplex-fleet-token": token, **salted}
        status, reply = await served.post("/v1/completions", body, **headers)
        usage = reply.get("usage", {}).get("prompt_tokens_details", {})
        return status, usage.get("cached_tokens", -1)

    assert await cached() == (200, 0)
    _, whole = await cached(token="none")
    assert whole >= 96
    assert await cached("acme") == (200, 0), "another namespace"
    assert await cached("acme") == (200, whole)
    assert await cached("globex") == (200, 0)
    assert await cached("acme", token="forged") == (401, -1)
    status, reply = await served.post("/v1/completions", {**body, "cache_salt": "acme"})
    assert (status, reply["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize("choices", [{"n": 4}, {"n": 1, "best_of": 4}])
async def test_choices_of_one_prompt_share_its_pages(serve: Any, choices: dict[str, int]) -> None:
    served = await serve()
    body = {"model": "ada", "prompt": "a prompt of several pages, " * 4, "max_tokens": 2}
    before = await _prefilled(served)
    status, reply = await served.post("/v1/completions", {**body, **choices, "temperature": 1})
    assert status == 200, reply
    usage = reply["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "it was computed, once"
    last_page = (usage["prompt_tokens"] - 1) % 16 + 1
    assert await _prefilled(served) - before == usage["prompt_tokens"] + 3 * last_page


async def _prefilled(served: Any) -> int:
    """Prompt tokens computed so far."""
    _, text = await served.get("/metrics")
    name = 'loraplex_replica_tokens_total{kind="prefill"} '
    return int(float(next(line for line in text.splitlines() if name in line).removeprefix(name)))
