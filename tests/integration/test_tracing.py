"""One request's way through real processes, as a collector and the logs tell it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from collector import Collector, Seen, collecting
from local_fleet import RunningFleet, eventually, running

SERVER, CLIENT = 2, 3  # OTLP's span kinds
CANARY = "zanzibar"  # in every prompt here, and to be found in no log and no span


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[RunningFleet]:
    """Everything is sampled that no client decides on, and every request leaves a line."""
    from replica.engine.tiny import tiny_adapter, tiny_model

    folder = tmp_path_factory.mktemp("traced")
    config = tiny_model(folder / "base", context=1024)
    tiny_adapter(folder / "adapters" / "tuned", config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORAPLEX_LOG_REQUESTS", "all")
        patch.setenv("LORAPLEX_LOG_LEVEL", "DEBUG")
        file = folder / "gateway.yaml"
        file.write_text(f"tracing: {{endpoint: '{collector.url}', ratio: 1}}")
        words = ("--replicas", "1", "--config", str(file))
        with running(folder / "data", folder / "base", folder / "adapters", *words) as fleet:
            yield fleet


def ask(
    fleet: RunningFleet, *, tokens: int = 4, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    return httpx.post(
        f"{fleet.url}/v1/completions",
        json={"model": "tuned", "prompt": f"once {CANARY}", "max_tokens": tokens, **body},
        headers={"Authorization": f"Bearer {fleet.key()}", **(headers or {})},
        timeout=60,
    )


def parent(trace: str, *, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-00f067aa0ba902b7-{int(sampled):02x}"}


def tree(spans: list[Seen]) -> dict[str, tuple[str, str]]:
    """By name: who it is from, and its parent's name."""
    names = {one.span: one.name for one in spans}
    roots = [one for one in spans if one.kind == SERVER]
    return {
        f"{one.service.removeprefix('loraplex-')} {one.name}": (
            names.get(one.parent, "client"),
            "root" if one in roots else "",
        )
        for one in spans
    }


GATEWAY = {
    "gateway POST /v1/completions": ("client", "root"),
    "gateway admit": ("POST /v1/completions", ""),
    "gateway queue": ("POST /v1/completions", ""),
    "gateway route": ("POST /v1/completions", ""),
    "gateway forward": ("POST /v1/completions", ""),
    "gateway first_token": ("forward", ""),
    "gateway stream": ("forward", ""),
}
REPLICA = {
    "replica POST /v1/completions": ("forward", "root"),
    "replica wait": ("POST /v1/completions", ""),
    "replica load": ("wait", ""),
    "replica prefill": ("POST /v1/completions", ""),
    "replica decode": ("POST /v1/completions", ""),
}


def test_one_trace_goes_from_the_client_through_gateway_and_replica_stage_by_stage(
    fleet: RunningFleet, collector: Collector
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {**parent(trace), "tracestate": "rojo=00f067aa0ba902b7"}
    reply = ask(fleet, headers=headers, stream=True)
    assert reply.status_code == 200, reply.text
    spans = collector.trace(trace)
    assert tree(spans) == GATEWAY | REPLICA  # the first to ask for it waits for its adapter
    assert len(spans) == len(GATEWAY | REPLICA)
    by_name = {f"{one.service}/{one.name}": one for one in spans}
    root = by_name["loraplex-gateway/POST /v1/completions"]
    assert root.parent == "00f067aa0ba902b7"
    assert root.state == "rojo=00f067aa0ba902b7"
    assert by_name["loraplex-gateway/forward"].kind == CLIENT
    told = {
        "loraplex.tenant": "acme",
        "loraplex.adapter": "tuned",
        "loraplex.replica": "replica-0",
        "loraplex.placement": reply.headers["x-loraplex-placement"],
        "loraplex.version": reply.headers["x-loraplex-adapter-version"],
        "loraplex.request_id": reply.headers["x-request-id"],
        "loraplex.outcome": "ok",
        "gen_ai.usage.output_tokens": 4,
    }
    assert told.items() <= root.about.items()
    theirs = by_name["loraplex-replica/POST /v1/completions"]
    assert theirs.instance == "replica-0"
    assert theirs.about["loraplex.request_id"] == reply.headers["x-request-id"]
    assert theirs.about["gen_ai.usage.output_tokens"] == 4
    assert by_name["loraplex-replica/load"].about["loraplex.tier"] in ("host", "disk")
    for one in spans:
        assert root.began <= one.began <= one.ended, one.name
        assert not one.error, one.name


def test_a_longer_answer_has_no_more_spans_and_a_loaded_adapter_no_load(
    fleet: RunningFleet, collector: Collector
) -> None:
    ask(fleet)
    trace = "a" * 32
    assert ask(fleet, tokens=60, headers=parent(trace), ignore_eos=True).status_code == 200
    assert set(tree(collector.trace(trace))) == {*GATEWAY, *REPLICA} - {
        "gateway stream",  # nothing was streamed
        "replica load",
    }


def test_whoever_began_the_trace_decides_and_who_comes_without_one_gets_one(
    fleet: RunningFleet, collector: Collector
) -> None:
    unsampled = "b" * 32
    assert ask(fleet, headers=parent(unsampled, sampled=False)).status_code == 200
    request = ask(fleet).headers["x-request-id"]
    ours = collector_trace_of(collector, request)
    assert {one.service for one in ours} == {"loraplex-gateway", "loraplex-replica"}
    [root] = [one for one in ours if not one.parent]
    assert root.service == "loraplex-gateway"
    assert not [one for one in collector.spans if one.trace == unsampled]


def collector_trace_of(collector: Collector, request: str) -> list[Seen]:
    def found() -> list[str]:
        return [
            one.trace
            for one in [*collector.spans]
            if one.about.get("loraplex.request_id") == request
        ]

    eventually(found, 10)
    return collector.trace(found()[0])


def test_a_request_that_is_refused_says_why_and_ends_where_it_was(
    fleet: RunningFleet, collector: Collector
) -> None:
    nobody, unknown = "c" * 32, "d" * 32
    ask(fleet, headers={**parent(nobody), "Authorization": "Bearer nobody"})
    ask(fleet, headers=parent(unknown), model="unknown")
    for trace, why in ((nobody, "unauthenticated"), (unknown, "model_not_found")):
        root, admit = collector.trace(trace, services=1)
        assert (root.about["error.type"], admit.name) == (why, "admit")


def lines_of(log: Path) -> list[dict[str, Any]]:
    """Everything a process said, as the JSON that it has to be."""
    return [
        json.loads(line)
        for line in log.read_text().splitlines()
        if not line.startswith("loraplex ")  # the ready line, for who started it
    ]


def test_the_logs_of_both_tell_who_where_and_how_long_under_the_same_ids(
    fleet: RunningFleet,
) -> None:
    trace = "e" * 32
    reply = ask(fleet, headers=parent(trace), stream=True)
    found = []
    for name in ("gateway", "replica-0"):
        log = fleet.data / "logs" / f"{name}.log"
        eventually(lambda log=log: any(one.get("trace_id") == trace for one in lines_of(log)))
        [line] = [one for one in lines_of(log) if one.get("trace_id") == trace]
        assert line["request_id"] == reply.headers["x-request-id"]
        assert line["replica"] == "replica-0"
        assert line["adapter"] == "tuned"
        assert line["outcome"] == "ok"
        assert line["completion_tokens"] == 4
        found.append(line)
    gateway, replica = found
    assert gateway["tenant"] == "acme"
    assert gateway["placement"] == reply.headers["x-loraplex-placement"]
    assert 0 < gateway["first_token_s"] <= gateway["total_s"]
    assert 0 <= gateway["queue_s"] <= gateway["first_token_s"]
    stages = replica["wait_s"] + replica["prefill_s"] + replica["decode_s"]
    assert 0 < stages <= replica["total_s"] <= gateway["total_s"]


def test_no_log_and_no_span_has_a_word_of_a_prompt_or_an_answer(
    fleet: RunningFleet, collector: Collector
) -> None:
    """Whatever is wrong with a request, and at the most talkative log level."""
    spoilt: list[dict[str, Any]] = [
        {"prompt": f"{CANARY} " * 2000},  # too long
        {"prompt": {"text": CANARY}},
        {"prompt": f"{CANARY} \ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace")},
        {"max_tokens": CANARY},
        {"temperature": CANARY},
        {"stop": [CANARY] * 99},
        {"suffix": CANARY},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": CANARY}}}},
        {"logit_bias": {CANARY: 1}},
        {CANARY: 1},
        {"echo": True, "logprobs": 1},
    ]
    key = {"Authorization": f"Bearer {fleet.key()}"}
    for body in spoilt:
        ask(fleet, **body)
        ask(fleet, **body, stream=True)
    for messages in (
        [{"role": CANARY, "content": CANARY}],
        CANARY,
        [CANARY],
        [{"content": CANARY}],
    ):
        chat = {"model": "tuned", "messages": messages, "max_tokens": 2}
        httpx.post(f"{fleet.url}/v1/chat/completions", json=chat, headers=key, timeout=60)
    for broken in (f'{{"model": "tuned", "prompt": "{CANARY}', f"{CANARY} is not JSON"):
        httpx.post(f"{fleet.url}/v1/completions", content=broken, headers=key, timeout=60)
    for url in (fleet.url, replica_of(fleet)):
        beside_its_length(url, fleet.key())
    said = [path.read_text() for path in (fleet.data / "logs").iterdir()]
    assert len(said) >= 2
    for text in [*said, fleet.said.read_text()]:
        assert CANARY not in text, next(line for line in text.splitlines() if CANARY in line)
    for raw in collector.raw:
        assert CANARY.encode() not in raw


def replica_of(fleet: RunningFleet) -> str:
    text = (fleet.data / "run" / "gateway.yaml").read_text()
    return next(word for word in text.split() if word.startswith("http://127") and word[-1] != "/")


def beside_its_length(url: str, key: str) -> None:
    """What a body has more than its `Content-Length` is read as the next request's first line."""
    body = json.dumps({"model": "tuned", "prompt": "a", "max_tokens": 1})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    where = urlsplit(url)
    with socket.create_connection((where.hostname or "", where.port or 80), 10) as wire:
        wire.sendall(f"{head}{body}{CANARY} {CANARY}: and more\r\n\r\n".encode())
        wire.settimeout(10)
        while wire.recv(65536):
            pass


def test_a_collector_that_is_away_delays_nobody(fleet: RunningFleet, collector: Collector) -> None:
    collector.status = 503
    try:
        assert [ask(fleet).status_code for _ in range(5)] == [200] * 5
    finally:
        collector.status = 200


def test_without_a_collector_no_exporter_is_loaded() -> None:
    import subprocess
    import sys

    code = (
        "import sys, gateway.__main__, replica.__main__, replica.journal\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.exporter')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
