"""A replica whose base has become one adapter: it serves that, says so, and refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replica.app import Replica
from replica.config import ReplicaConfig
from shared.settings import BadSettings
from shared.wire import ADAPTER_VERSION, decode_report


async def test_a_merged_replica_says_what_the_adapter_says_beside_the_base(serve: Any) -> None:
    beside, merged = await serve(), await serve(merged="bob")
    for prompt in ("once", "upon a time", "there was"):
        wanted = await beside.tokens("bob", prompt, 24)
        assert await merged.tokens("bob", prompt, 24) == wanted
        assert wanted != await beside.tokens("tiny", prompt, 24)
    assert merged.replica.engine.cache.states() == ()  # no slot, no copy, no gathered product


async def test_it_names_the_version_that_was_merged(serve: Any) -> None:
    beside, merged = await serve(), await serve(merged="bob")
    body = {"model": "bob", "prompt": "once", "max_tokens": 2, "temperature": 0}
    versions = []
    for served in (beside, merged):
        async with served.http.post(served.url + "/v1/completions", json=body) as reply:
            fingerprint = (await reply.json())["system_fingerprint"]
            versions.append((reply.headers[ADAPTER_VERSION], fingerprint))
    assert versions[0] == versions[1]
    assert versions[0][0] == (await beside.adapter("bob"))["digest"]


async def test_its_reports_say_that_it_is_merged_and_holds_that_adapter_alone(serve: Any) -> None:
    beside, merged = await serve(), await serve(merged="bob")
    async with merged.http.get(merged.url + "/reports") as reports:
        report = decode_report(await reports.content.readline())
    assert report.merged == "bob"
    [state] = report.adapters
    known = beside.replica.front.adapters["bob"]
    assert (state.adapter, state.digest, state.rank) == ("bob", known.digest, known.rank)
    assert (state.tier, state.status) == ("gpu", "ready")
    assert beside.replica.front.report.merged is None


@pytest.mark.parametrize("model", ["tiny", "ada", "nobody"])
async def test_base_and_other_adapters_are_refused_with_the_reason(model: str, serve: Any) -> None:
    served = await serve(merged="bob")
    body = {"model": model, "prompt": "once", "max_tokens": 2}
    status, reply = await served.post("/v1/completions", body)
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert "`bob` merged into its base" in reply["error"]["message"]
    assert (await served.get(f"/v1/models/{model}"))[0] == 404


async def test_its_one_model_is_the_adapter(serve: Any) -> None:
    served = await serve(merged="bob")
    _, listed = await served.get("/v1/models")
    assert [(model["id"], model["parent"]) for model in listed["data"]] == [("bob", "tiny")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "ada", "lora_path": "ada"}),
        ("/v1/unload_lora_adapter", {"lora_name": "bob"}),
        ("/pin", {"adapter": "bob"}),
        ("/prefetch", {"adapters": ["ada"]}),
    ],
)
async def test_adapters_do_not_come_and_go_on_it(path: str, body: Any, serve: Any) -> None:
    served = await serve(merged="bob")
    status, reply = await served.post(path, body)
    assert (status, reply["error"]["code"]) == (400, "merged")
    assert await served.tokens("bob")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"merged": "nobody"}, "merged: nobody: "),
        ({"merged": "../base"}, "merged: ../base: bad_name"),
        ({"merged": "bob", "served_name": "bob"}, "merged: the base has this name"),
    ],
)
def test_what_cannot_be_merged_is_said_at_the_start(
    tiny: Path, settings: dict[str, Any], said: str
) -> None:
    paths = {"base": tiny / "base", "adapters": tiny / "adapters"}
    with pytest.raises(BadSettings, match=said):
        Replica(ReplicaConfig.model_validate({**paths, **settings}))


async def test_a_rank_above_the_cap_of_slots_can_be_merged(serve: Any) -> None:
    served = await serve(merged="cyd", max_lora_rank=8)
    assert await served.tokens("cyd")


async def test_an_adapter_merged_into_an_eight_bit_base_is_served(serve: Any) -> None:
    served = await serve(merged="bob", quantization="fp8")
    assert await served.tokens("bob")
