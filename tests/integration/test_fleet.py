"""`loraplex up` and the official OpenAI SDK: what a user's first hour looks like."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from local_fleet import LORAPLEX, RunningFleet, eventually

QUESTION = [{"role": "user", "content": "Describe the sea."}]
ASK: dict[str, Any] = {"messages": QUESTION, "max_tokens": 16, "temperature": 0}
ADAPTERS = ("french", "pirate", "shout")


def chat(fleet: RunningFleet, model: str, tenant: str = "acme", **changes: Any) -> str:
    with fleet.client(tenant) as client:
        reply = client.chat.completions.create(model=model, **{**ASK, **changes})
    text: str = reply.choices[0].message.content or ""
    return text


def test_models_lists_the_base_and_every_adapter_as_its_child(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        models = {model.id: model for model in client.models.list()}
        assert client.models.retrieve("shout").id == "shout"
    assert set(models) == {fleet.base, *ADAPTERS}
    assert models["shout"].model_dump()["parent"] == fleet.base
    assert models[fleet.base].model_dump()["parent"] is None


def test_base_and_adapters_asked_at_once_each_answer_in_their_manner(fleet: RunningFleet) -> None:
    models = (fleet.base, *ADAPTERS)
    with ThreadPoolExecutor(len(models)) as pool:
        answers = dict(zip(models, pool.map(lambda m: chat(fleet, m), models), strict=True))
    assert len(set(answers.values())) == len(models)
    assert answers["shout"] == answers["shout"].upper()
    assert answers["pirate"].startswith("Arrr!")
    assert answers["french"].startswith("Bien sûr !")
    assert answers[fleet.base].startswith("The sea")
    alone = {model: chat(fleet, model) for model in models}
    assert alone == answers  # neighbours in the batch change nothing


def test_chat_answers_with_text_usage_and_the_placement_in_headers(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        raw = client.chat.completions.with_raw_response.create(model="pirate", **ASK)
    reply = raw.parse()
    assert reply.model == "pirate"
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert raw.headers["x-request-id"]
    assert raw.headers["x-loraplex-replica"] in ("replica-0", "replica-1")
    assert raw.headers["x-loraplex-placement"] in ("home", "warm", "spill", "cold")
    assert float(raw.headers["x-loraplex-queue-ms"]) >= 0
    assert raw.headers["x-loraplex-adapter-version"]
    assert int(raw.headers["x-ratelimit-remaining-requests"]) >= 0


def test_completions_continue_a_prompt(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        reply = client.completions.create(
            model=fleet.base, prompt="The capital of France is", max_tokens=4, temperature=0
        )
    assert reply.object == "text_completion"
    assert "Paris" in reply.choices[0].text
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("usage", [True, False, None])
def test_a_stream_is_the_plain_answer_and_has_usage_only_if_asked(
    fleet: RunningFleet, kind: str, usage: bool | None
) -> None:
    options = {} if usage is None else {"stream_options": {"include_usage": usage}}
    with fleet.client() as client:
        if kind == "chat":
            plain = chat(fleet, "pirate")
            stream = client.chat.completions.create(model="pirate", stream=True, **ASK, **options)
            chunks = list(stream)
            pieces = [choice.delta.content for chunk in chunks for choice in chunk.choices]
        else:
            ask = {"model": "pirate", "prompt": "The sea is", "max_tokens": 8, "temperature": 0}
            plain = client.completions.create(**ask).choices[0].text
            chunks = list(client.completions.create(stream=True, **ask, **options))
            pieces = [choice.text for chunk in chunks for choice in chunk.choices]
    assert "".join(piece or "" for piece in pieces) == plain
    counted = [chunk for chunk in chunks if chunk.usage]
    if usage:
        assert counted == chunks[-1:]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens > 0
    else:
        assert not counted
        assert all(chunk.choices for chunk in chunks)


def test_the_same_seed_gives_the_same_text_and_stop_ends_it(fleet: RunningFleet) -> None:
    warm = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    assert chat(fleet, fleet.base, **warm) == chat(fleet, fleet.base, **warm)
    assert "," in chat(fleet, "pirate", max_tokens=30)
    assert "," not in chat(fleet, "pirate", max_tokens=30, stop=[","])


def test_errors_are_the_sdks_own_classes(fleet: RunningFleet) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(fleet, "nobody")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        chat(fleet, "pirate", temperature=-1)
    assert bad.value.param == "temperature"
    with (
        openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_model_that_is_not_permitted_is_the_same_404_as_an_unknown_one(
    fleet: RunningFleet,
) -> None:
    fleet.cli("tenant", "create", "narrow", "--model", "pirate")
    secret = fleet.cli("tenant", "key-create", "narrow", "--json")["secret"]
    said = []
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=secret, max_retries=0) as client:
        eventually(lambda: [model.id for model in client.models.list()] == ["pirate"])
        for model in ("shout", "shxut"):
            with pytest.raises(openai.NotFoundError) as refused:
                client.chat.completions.create(model=model, **ASK)
            said.append(str(refused.value.body).replace(model, "MODEL"))
    assert said[0] == said[1]
    fleet.cli("tenant", "delete", "narrow", "--yes")


def test_a_quota_changes_live_and_says_when_to_come_back(fleet: RunningFleet) -> None:
    fleet.cli("tenant", "create", "small", "--requests-per-min", "2")
    secret = fleet.cli("tenant", "key-create", "small", "--json")["secret"]
    with openai.OpenAI(base_url=f"{fleet.url}/v1", api_key=secret, max_retries=0) as client:
        eventually(lambda: _permitted(client))
        ask = {"model": "pirate", **ASK, "max_tokens": 1}
        for _ in range(2):
            client.chat.completions.create(**ask)
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**ask)
        assert 0 < float(refused.value.response.headers["retry-after"]) <= 60
        fleet.cli("tenant", "set", "small", "--requests-per-min", "none")
        eventually(lambda: _served(client, ask))
    fleet.cli("tenant", "delete", "small", "--yes")


def _permitted(client: openai.OpenAI) -> bool:
    try:
        return bool(client.models.list().data)
    except openai.AuthenticationError:
        return False  # the key is on its way to the gateway


def _served(client: openai.OpenAI, ask: dict[str, Any]) -> bool:
    try:
        return bool(client.chat.completions.create(**ask))
    except openai.RateLimitError:
        return False


def test_usage_appears_in_the_ledger_as_the_replies_counted_it(fleet: RunningFleet) -> None:
    def used() -> tuple[int, int]:
        rows = fleet.cli("usage", "--by", "tenant,adapter", "--json")
        mine = [row for row in rows if (row["tenant"], row["adapter"]) == ("globex", "french")]
        return (
            sum(row["requests"] for row in mine),
            sum(row["prompt_tokens"] + row["completion_tokens"] for row in mine),
        )

    requests, tokens = used()
    with fleet.client("globex") as client:
        plain = client.chat.completions.create(model="french", **ASK)
        stream = client.chat.completions.create(model="french", stream=True, **ASK)
        list(stream)  # usage was not asked for, and is counted all the same
    assert plain.usage is not None
    eventually(lambda: used() == (requests + 2, tokens + 2 * plain.usage.total_tokens))


def test_the_admin_commands_show_the_fleet(fleet: RunningFleet) -> None:
    chat(fleet, "shout")
    replicas = fleet.cli("replica-set", "list", "--json")
    assert [row["replica"] for row in replicas] == ["replica-0", "replica-1"]
    shout = fleet.cli("adapter", "show", "shout", "--json")
    assert shout["rank"] == 8
    assert {place["replica"] for place in shout["places"]} == {"replica-0", "replica-1"}
    explained = fleet.cli("explain", "--tenant", "acme", "--model", "shout", "--json")
    assert explained["chosen"] in ("replica-0", "replica-1")
    assert explained["owners"]
    seen = fleet.cli("top", "--json")
    assert [row["state"] for row in seen["replicas"]] == ["up", "up"]
    assert {row["adapter"] for row in seen["adapters"]} == set(ADAPTERS)
    for words in (
        ("tenant", "list"),
        ("tenant", "show", "acme"),
        ("adapter", "list"),
        ("adapter", "show", "shout"),
        ("replica-set", "list"),
        ("explain", "--tenant", "acme", "--model", fleet.base),
        ("top", "--once"),
        ("usage", "--by", "tenant,adapter,hour", "--format", "csv"),
    ):
        assert len(fleet.cli(*words).splitlines()) >= 2, words
    assert "Arrr!" in fleet.cli("chat", "pirate", "Describe the sea.", "--max-tokens", "8")
    talk = fleet.cli("chat", "shout", "--max-tokens", "8", typed="Describe the sea.\n\nAnd?\n")
    assert talk.startswith("THE SEA")
    assert len(talk.splitlines()) == 2  # an answer for each question that is one


def test_a_drained_replica_gets_nothing_until_it_is_resumed(fleet: RunningFleet) -> None:
    fleet.cli("replica-set", "drain", "replica-0")
    try:
        with fleet.client() as client:
            for model in (fleet.base, *ADAPTERS):
                raw = client.chat.completions.with_raw_response.create(model=model, **ASK)
                assert raw.headers["x-loraplex-replica"] == "replica-1"
    finally:
        fleet.cli("replica-set", "resume", "replica-0")
    states = {row["replica"]: row["state"] for row in fleet.cli("replica-set", "list", "--json")}
    assert states["replica-0"] == "up"


def test_mistakes_on_the_command_line_say_what_to_do(fleet: RunningFleet) -> None:
    assert "nobody" in fleet.cli("tenant", "show", "nobody", code=1)
    assert "limits.requests_per_min" in fleet.cli(
        "tenant", "set", "acme", "--requests-per-min", str(10**13), code=1
    )
    assert "whole number" in fleet.cli("tenant", "set", "acme", "--tokens-per-min", "x", code=2)
    assert "nobody" in fleet.cli("chat", "nobody", "Hello?", code=1)
    away = fleet.cli("tenant", "list", "--gateway", "http://127.0.0.1:9", code=1)
    assert "loraplex up" in away
    again = [*LORAPLEX, "up", "--data-dir", str(fleet.data), "--port", "0"]
    second = subprocess.run(again, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"already runs in {fleet.data} on {fleet.url}" in second.stderr


def test_a_killed_replica_is_replaced_and_requests_go_on_meanwhile(fleet: RunningFleet) -> None:
    killed = fleet.pid("replica-0")
    os.kill(killed, signal.SIGKILL)
    for model in (fleet.base, *ADAPTERS):
        assert chat(fleet, model)

    def back() -> bool:
        rows = fleet.cli("replica-set", "list", "--json")
        return {row["replica"]: row["state"] for row in rows}["replica-0"] == "up"

    eventually(back, within_s=60)
    assert fleet.pid("replica-0") != killed
    assert "replica-0 was killed by SIGKILL" in fleet.said.read_text()
    assert httpx.get(f"{fleet.url}/readyz").status_code == 200
