"""Whatever comes in, the answer is a clear error in OpenAI's shape, and everything else goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_fleet import RunningFleet, eventually

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Describe the sea."}]


@pytest.fixture
def http(fleet: RunningFleet, unlimited_key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {unlimited_key}", "Content-Type": "application/json"}
    with httpx.Client(base_url=fleet.url, headers=headers, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(autouse=True)
def everything_else_goes_on(http: httpx.Client) -> Iterator[None]:
    yield
    reply = ask(http, "shout")
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"].startswith("THE SEA")


def ask(http: httpx.Client, model: str, **changes: Any) -> httpx.Response:
    body = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0, **changes}
    return http.post(CHAT, json=body)


def error(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"]
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in reply.text
    fault: dict[str, Any] = body["error"]
    return fault


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ("{", None, "not valid JSON"),
        ("[]", None, "JSON object"),
        ("", None, "not valid JSON"),
        ({"messages": QUESTION}, "model", "model"),
        ({"model": 7, "messages": QUESTION}, "model", "model"),
        ({"model": "shout"}, "messages", "messages"),
        ({"model": "shout", "messages": "hello"}, "messages", "messages"),
        ({"model": "shout", "messages": []}, "messages", "messages"),
        ({"model": "shout", "messages": [{"role": "user"}]}, "messages", "content"),
        ({"model": "shout", "messages": QUESTION, "max_tokens": "many"}, "max_tokens", "many|int"),
        ({"model": "shout", "messages": QUESTION, "max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"model": "shout", "messages": QUESTION, "temperature": 3}, "temperature", "temperature"),
        ({"model": "shout", "messages": QUESTION, "top_p": -1}, "top_p", "top_p"),
        ({"model": "shout", "messages": QUESTION, "n": 10**6}, "n", "n"),
        ({"model": "shout", "messages": QUESTION, "lora_path": "/etc"}, "lora_path", "lora_path"),
        ({"model": "shout", "messages": QUESTION, "max_tokens": 10**6}, "max_tokens|messages", ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_body_is_a_400_that_names_the_field(
    http: httpx.Client, body: Any, param: str | None, said: str, stream: bool
) -> None:
    if isinstance(body, dict):
        body = json.dumps(body | {"stream": stream})
    fault = error(http.post(CHAT, content=body), 400)
    assert fault["type"] == "invalid_request_error"
    assert (fault["param"] is None) == (param is None), fault
    if param is not None:
        assert fault["param"].partition(".")[0].partition("[")[0] in param.split("|"), fault
    assert any(word in fault["message"] for word in said.split("|")), fault


def test_a_huge_body_is_a_413(http: httpx.Client) -> None:
    error(ask(http, "shout", messages=[{"role": "user", "content": "x" * (11 << 20)}]), 413)


def test_a_missing_key_and_a_wrong_one_are_the_same_401(fleet: RunningFleet) -> None:
    body = {"model": "shout", "messages": QUESTION}
    missing = httpx.post(f"{fleet.url}{CHAT}", json=body)
    wrong = httpx.post(f"{fleet.url}{CHAT}", json=body, headers={"Authorization": "Bearer lp-no"})
    assert error(missing, 401) == error(wrong, 401)
    for path in ("tenants", "usage", "replicas"):
        tenants = {"Authorization": f"Bearer {fleet.key()}"}
        assert httpx.get(f"{fleet.url}/admin/v1/{path}", headers=tenants).status_code == 401


def test_an_unknown_model_is_a_404_that_names_the_field(http: httpx.Client) -> None:
    fault = error(ask(http, "nobody"), 404)
    assert (fault["param"], fault["code"]) == ("model", "model_not_found")
    assert "nobody" in fault["message"]


@pytest.mark.parametrize("path", ["/v1/nothing", "/nothing", "/v1/v1/chat/completions"])
def test_an_address_that_is_none_is_a_404_in_the_same_shape(http: httpx.Client, path: str) -> None:
    error(http.post(path, json={}), 404)


def without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def of_rank(rank: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"r": rank}))

    return change


def of_another_base(folder: Path) -> None:
    from replica.engine.tiny import tiny_adapter, tiny_model

    config = tiny_model(folder.parent.parent / "tiny")
    shutil.rmtree(folder)
    tiny_adapter(folder, config)


def torn(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (without_weights, "adapter_model.safetensors"),
        (without_config, "adapter_config.json"),
        (of_rank(128), "128"),
        (of_another_base, "base|shape|in_features|hidden|layers"),
        (torn, "adapter_model.safetensors"),
    ],
    ids=["no-weights", "no-config", "rank", "other-base", "torn"],
)
def test_a_broken_adapter_is_refused_with_its_reason_and_harms_nobody(
    fleet: RunningFleet,
    http: httpx.Client,
    real_adapters: Path,
    tmp_path: Path,
    broken: Callable[[Path], None],
    said: str,
) -> None:
    shutil.copytree(real_adapters / "shout", tmp_path / "broken")
    broken(tmp_path / "broken")
    folder = fleet.adapters / "broken"
    shutil.move(tmp_path / "broken", folder)
    try:
        eventually(lambda: "broken" in fleet.cli("adapter", "list"))
        found = fleet.cli("adapter", "show", "broken", "--json")
        assert {place["status"] for place in found["places"]} == {"failed"}
        reasons = {place["reason"] for place in found["places"]}
        assert all(any(word in reason for word in said.split("|")) for reason in reasons), reasons
        assert error(ask(http, "broken"), 404)["param"] == "model"
        listed = {model["id"] for model in http.get("/v1/models").json()["data"]}
        assert listed == {fleet.base, "french", "pirate", "shout"}
    finally:
        shutil.rmtree(folder)
    eventually(lambda: "broken" not in fleet.cli("adapter", "list"))


def test_an_adapter_dropped_in_is_served_and_one_taken_away_is_a_404(
    fleet: RunningFleet, http: httpx.Client, real_adapters: Path, tmp_path: Path
) -> None:
    shutil.copytree(real_adapters / "pirate", tmp_path / "captain")
    shutil.move(tmp_path / "captain", fleet.adapters / "captain")
    eventually(lambda: ask(http, "captain").status_code == 200)
    assert ask(http, "captain").json()["choices"] == ask(http, "pirate").json()["choices"]
    shutil.rmtree(fleet.adapters / "captain")
    eventually(lambda: ask(http, "captain").status_code == 404)


def test_bad_requests_amid_good_ones_change_no_answer(http: httpx.Client) -> None:
    def one(place: int) -> str:
        model = ("pirate", "nobody", "french", "shout")[place % 4]
        temperature = -1 if place % 5 == 0 else 0
        reply = ask(http, model, temperature=temperature)
        if model == "nobody" or temperature:
            assert reply.status_code in (400, 404)
            return ""
        return f"{model}: {reply.json()['choices'][0]['message']['content']}"

    with ThreadPoolExecutor(8) as pool:
        answers = {answer for answer in pool.map(one, range(24)) if answer}
    assert len(answers) == 3, answers
