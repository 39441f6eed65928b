"""Each make of server, scripted by its documentation: what is read of it, and what it is sent.

The pages are as the sources named in gateway/engines have them: vLLM's from a transcript of release
0.32, SGLang's from "Production Metrics" and its http_server.py, LoRAX's from its router, those of
trtllm-serve from its openai_server.py.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from scripted import until
from served import Served, polled, record

from gateway.config import ReplicaEntry
from gateway.engines import ENGINES
from gateway.engines.engine import Answer, Call, name_here, name_there
from shared.ids import AdapterId
from shared.messages import AdapterState, Tier
from shared.settings import BadSettings, parse

DIGEST, OLD = "0123456789abcdef", "fedcba9876543210"
PIRATE = AdapterId("pirate")
ASKED = orjson.dumps({"model": "pirate", "messages": [], "stream": True})


def listed(*adapters: str, base: str = "base") -> tuple[int, Any]:
    """As vLLM and SGLang list them."""
    models: list[dict[str, Any]] = [
        {"id": base, "object": "model", "root": base, "parent": None, "max_model_len": 2048}
    ]
    for name in adapters:
        models.append({"id": name, "root": "/a", "parent": base, "max_model_len": None})
    return 200, {"object": "list", "data": models}


VLLM_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_waiting{engine="0",model_name="base"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="base",reason="capacity"} 2.0
vllm:lora_requests_info{max_lora="2",running_lora_adapters="shout",waiting_lora_adapters=""} 1.7e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="b,c",waiting_lora_adapters=""} 1.8e+09
process_start_time_seconds 1.7e+09
"""


def states(report: Any) -> dict[str, AdapterState]:
    return {state.adapter: state for state in report.adapters}


async def test_vllm_tells_what_runs_and_the_rest_is_inferred() -> None:
    pages: dict[str, Any] = {
        "/v1/models": listed("a", "b", "c", "shout"),
        "/metrics": (200, VLLM_METRICS),
    }
    async with (
        Served(pages) as server,
        polled(server.port, kind="vllm", api_key="k3y", host_slots=3) as (_, pump),
    ):
        await until(lambda: pump.reports)
    report = pump.reports[-1]
    assert (report.base, report.max_model_len, report.slots) == ("base", 2048, 2)
    assert (report.running, report.waiting) == (3, 2)
    told = states(report)
    assert {name: (one.tier, one.inferred, one.running) for name, one in told.items()} == {
        "a": (Tier.HOST, True, 0),
        "b": (Tier.GPU, False, 1),
        "c": (Tier.GPU, False, 1),
        "shout": (Tier.DISK, True, 0),
    }
    assert server.keys == {"Bearer k3y"}


async def test_a_vllm_that_was_started_anew_between_two_looks_is_a_new_life() -> None:
    pages: dict[str, Any] = {"/v1/models": listed("a"), "/metrics": (200, VLLM_METRICS)}
    async with Served(pages) as server, polled(server.port, kind="vllm") as (it, pump):
        await until(lambda: pump.reports)
        it.completion(ASKED, AdapterId("a"), "")
        await until(lambda: states(pump.reports[-1])["a"].tier is Tier.GPU)
        boot = pump.reports[-1].boot
        pages["/metrics"] = (200, VLLM_METRICS.replace("seconds 1.7", "seconds 1.9"))
        await until(lambda: pump.reports[-1].boot != boot)
    assert states(pump.reports[-1])["a"].tier is Tier.HOST
    assert pump.lost == 0


async def test_a_vllm_whose_engine_has_died_is_lost_though_it_lists_on() -> None:
    pages: dict[str, Any] = {"/v1/models": listed("a"), "/health": (200, "")}
    async with Served(pages) as server, polled(server.port, kind="vllm") as (_, pump):
        await until(lambda: pump.reports)
        pages["/health"] = (503, "")
        await until(lambda: pump.lost == 1)


async def test_a_version_is_known_by_its_name_there_and_the_current_one_is_served() -> None:
    names = [name_there("pirate", OLD), name_there("pirate", DIGEST), name_there("gone", OLD)]
    its = record("pirate", (OLD, "/p/1"), (DIGEST, "/p/2"))
    async with (
        Served({"/v1/models": listed(*names)}) as server,
        polled(server.port, its, kind="vllm", slots=2) as (it, pump),
    ):
        await until(lambda: pump.reports)
        told = states(pump.reports[-1])
        assert told.keys() == {"pirate"}, "what the registry forgot is not served"
        assert told[PIRATE].digest == DIGEST
        assert it.held == frozenset(("base", *names))
        sent = orjson.loads(it.completion(ASKED, PIRATE, DIGEST))
        assert sent == orjson.loads(ASKED) | {"model": "pirate@0123456789ab"}
        await until(lambda: states(pump.reports[-1])["pirate"].tier is Tier.GPU)


async def test_sglang_is_sent_the_bases_name_before_the_adapters() -> None:
    metrics = 'sglang:num_running_reqs{model_name="base"} 162.0\nsglang:num_queue_reqs{} 2826.0\n'
    pages: dict[str, Any] = {"/v1/models": listed("pirate"), "/metrics": (200, metrics)}
    async with (
        Served(pages) as server,
        polled(server.port, kind="sglang", slots=8) as (it, pump),
    ):
        await until(lambda: pump.reports)
        assert (pump.reports[-1].running, pump.reports[-1].waiting) == (162, 2826)
        for adapter, model in ((PIRATE, "base:pirate"), (None, "base")):
            sent = orjson.loads(it.completion(ASKED, adapter, ""))
            assert sent == orjson.loads(ASKED) | {"model": model}
        del pages["/metrics"]  # --enable-metrics was not given
        await until(lambda: pump.reports[-1].running == 0)
        assert pump.lost == 0


async def test_lorax_serves_what_the_registry_has_a_path_for_under_that_path() -> None:
    info = {"model_id": "mistral", "max_total_tokens": 4096, "model_type": "causal_lm"}
    pages: dict[str, Any] = {
        "/info": (200, info),
        "/metrics": (200, "lorax_batch_current_size 5\nlorax_queue_length 4\n"),
    }
    records = record("pirate", (DIGEST, "org/pirate")), record("bare", (DIGEST, ""))
    async with (
        Served(pages) as server,
        polled(server.port, *records, kind="lorax", models=["org/other"], slots=4) as (it, pump),
    ):
        await until(lambda: pump.reports)
        report = pump.reports[-1]
        assert (report.base, report.max_model_len) == ("mistral", 4096)
        assert (report.running, report.waiting) == (5, 4)
        assert {one.adapter: one.digest for one in report.adapters} == {
            "org/other": "",
            "pirate": DIGEST,
        }
        for adapter, digest, model in (
            (PIRATE, DIGEST, "org/pirate"),
            (AdapterId("org/other"), "", "org/other"),
            (None, "", ""),
        ):
            assert orjson.loads(it.completion(ASKED, adapter, digest))["model"] == model


async def test_trtllm_is_sent_the_adapter_with_the_request() -> None:
    its = record("pirate", (DIGEST, "/p/2"))
    pages: dict[str, Any] = {
        "/v1/models": (200, {"data": [{"id": "llama", "object": "model"}]}),
        "/prometheus/metrics": (
            200,
            'trtllm_num_requests_running{model_name="llama"} 3.0\n'
            'trtllm_num_requests_waiting{model_name="llama"} 1.0\n',
        ),
    }
    async with (
        Served(pages) as server,
        polled(server.port, its, kind="trtllm", slots=4) as (it, pump),
    ):
        await until(lambda: pump.reports)
        assert (pump.reports[-1].running, pump.reports[-1].waiting) == (3, 1)
        sent = orjson.loads(it.completion(ASKED, PIRATE, DIGEST))
        number = sent["lora_request"].pop("lora_int_id")
        assert sent["model"] == "llama"
        assert sent["lora_request"] == {"lora_name": "pirate@0123456789ab", "lora_path": "/p/2"}
        assert 0 < number < 1 << 53
        assert "lora_request" not in orjson.loads(it.completion(ASKED, None, ""))


def test_trtllm_takes_no_names_that_it_would_answer_from_the_base() -> None:
    with pytest.raises(BadSettings, match="path in the registry"):
        parse(
            ReplicaEntry,
            {"id": "a", "url": "http://x", "kind": "trtllm", "models": ["*"]},
            origin="test",
        )


async def test_a_server_of_another_make_is_no_replica() -> None:
    async with (
        Served({"/info": (200, {"models": []})}) as server,
        polled(server.port, kind="lorax") as (_, pump),
    ):
        await until(lambda: server.keys)
    assert pump.reports == []


def error(code: int, message: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": "BadRequestError", "code": code}})


@pytest.mark.parametrize(
    ("kind", "call", "status", "said", "why"),
    [
        ("vllm", "load", 200, b"Success: LoRA adapter 'a' added successfully.", ""),
        ("vllm", "load", 400, error(400, "'a' has already been loaded. If you want"), ""),
        ("vllm", "load", 404, error(404, "Loading lora a failed: No adapter"), "Loading lora a"),
        ("vllm", "load", 500, error(500, "LoRA rank 128 is greater"), "LoRA rank 128 is greater"),
        ("vllm", "load", 404, b'{"detail":"Not Found"}', "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("vllm", "unload", 404, error(404, "The lora adapter 'a' cannot be found."), ""),
        ("vllm", "unload", 404, b'{"detail":"Not Found"}', "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("sglang", "load", 200, b'{"success":true,"loaded_adapters":{"a":{}}}', ""),
        ("sglang", "load", 400, b'{"success":false,"error_message":"too large"}', "too large"),
        ("sglang", "unload", 200, b'{"success":true,"loaded_adapters":{}}', ""),
        ("sglang", "unload", 200, b'{"success":false,"error_message":"busy"}', "busy"),
        ("sglang", "unload", 200, b'{"success":true,"loaded_adapters":{"a":{}}}', "loaded still"),
        ("sglang", "load", 200, b"OK", "OK"),
        ("sglang", "load", 401, b'{"error":"Unauthorized"}', "Unauthorized"),
    ],
)
def test_a_refusal_is_told_in_the_servers_own_words(
    kind: str, call: str, status: int, said: bytes, why: str
) -> None:
    engine = ENGINES[kind]()
    made = engine.load("a", "/a") if call == "load" else engine.unload("a")
    assert made is not None
    refusal = engine.refusal(made, Answer(status, said))
    assert (why in refusal) if why else (refusal == "")


def test_the_calls_are_those_of_the_documentation() -> None:
    body = {"lora_name": "a", "lora_path": "/a"}
    vllm, sglang = ENGINES["vllm"](), ENGINES["sglang"]()
    assert vllm.load("a", "/a") == Call("/v1/load_lora_adapter", body)
    assert vllm.unload("a") == Call("/v1/unload_lora_adapter", {"lora_name": "a"})
    assert sglang.load("a", "/a") == Call("/load_lora_adapter", body)
    assert sglang.unload("a") == Call("/unload_lora_adapter", {"lora_name": "a"})
    for kind in ("openai", "lorax", "trtllm"):
        assert ENGINES[kind]().load("a", "/a") is ENGINES[kind]().unload("a") is None


@pytest.mark.parametrize("name", ["a", "a@b", "x@0123456789ab", "org/a:v1", "two\nlines"])
def test_a_name_there_is_read_back(name: str) -> None:
    assert name_here(name_there(name, f"sha256:{DIGEST}")) == (name, DIGEST[:12])
