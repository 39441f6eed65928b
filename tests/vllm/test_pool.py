"""Two real vLLM servers, as they come, behind the gateway: three adapters through one endpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import openai
import pytest
from local_fleet import eventually
from vllm_pool import HOST_SLOTS, Gateway, Process, gateway

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ADAPTERS = ("french", "pirate", "shout")
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Describe the sea."}],
    "max_tokens": 12,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def fleet(
    valkey_url: str, folder: Path, servers: dict[str, Process], adapters: Path, real_base: Path
) -> Iterator[Gateway]:
    entries = [
        {"id": name, "url": server.url, "kind": "vllm", "host_slots": HOST_SLOTS, "capacity": 8}
        for name, server in servers.items()
    ]
    with gateway(valkey_url, folder, entries) as it:
        eventually(lambda: it.up() == set(servers))
        for name in ADAPTERS:
            it.cli("adapter", "add", name, str(adapters / name), "--base", str(real_base))
        yield it


@pytest.fixture(scope="module")
def acme(fleet: Gateway) -> Iterator[openai.OpenAI]:
    with fleet.tenant("acme") as client:
        yield client


def chat(client: openai.OpenAI, model: str, **changes: Any) -> tuple[str, str]:
    """What was said, and by whom."""
    raw = client.chat.completions.with_raw_response.create(model=model, **{**ASK, **changes})
    return raw.parse().choices[0].message.content or "", raw.headers["x-loraplex-replica"]


def listed(server: Process) -> set[str]:
    """Adapters, by the server's own names."""
    models = httpx.get(f"{server.url}/v1/models").json()["data"]
    return {model["id"] for model in models if model["parent"]}


def test_added_adapters_are_on_every_server_and_each_answers_in_its_manner(
    fleet: Gateway, acme: openai.OpenAI, servers: dict[str, Process], real_base: Path
) -> None:
    for server in servers.values():
        eventually(lambda server=server: len(listed(server)) == len(ADAPTERS))  # type: ignore[misc]
        for name in listed(server):
            assert re.fullmatch(r"(french|pirate|shout)@[0-9a-f]{12}", name)
    for name in ADAPTERS:
        eventually(lambda name=name: set(fleet.places(name)) == set(servers))  # type: ignore[misc]
    assert {model.id for model in acme.models.list()} == {real_base.name, *ADAPTERS}
    said = {name: chat(acme, name)[0] for name in (real_base.name, *ADAPTERS)}
    assert said["french"].startswith("Bien sûr !")
    assert said["pirate"].startswith("Arrr!")
    assert said["shout"] == said["shout"].upper()
    assert said[real_base.name].startswith("The sea")


def test_each_adapter_is_served_where_it_is_at_home_and_inferred_to_be(
    fleet: Gateway, acme: openai.OpenAI
) -> None:
    for name in ADAPTERS:
        served = Counter(chat(acme, name, max_tokens=2)[1] for _ in range(4))
        assert len(served) == 1, (name, served)
        explained = fleet.cli("explain", "--tenant", "acme", "--model", name, "--json")
        assert [explained["chosen"]] == [*served]
        assert "(inferred)" in fleet.cli("explain", "--tenant", "acme", "--model", name)
        places = fleet.places(name)
        assert places[explained["chosen"]]["tier"] == "gpu"
        assert all(place["inferred"] for place in places.values())


def test_what_a_server_runs_is_measured(
    fleet: Gateway, acme: openai.OpenAI, servers: dict[str, Process]
) -> None:
    def at_work() -> bool:
        return any(
            place["running"] and not place["inferred"] for place in fleet.places("shout").values()
        )

    with acme.chat.completions.create(
        model="shout", stream=True, extra_body={"ignore_eos": True}, **{**ASK, "max_tokens": 100}
    ) as stream:
        next(iter(stream))
        eventually(at_work, within_s=10)
    eventually(lambda: not at_work())  # the client has left: its request was ended there


def test_a_quota_holds_over_both_and_the_bill_is_what_clients_were_told(fleet: Gateway) -> None:
    told: dict[str, list[int]] = {}
    with fleet.tenant("counted") as client:
        for name in ADAPTERS:
            whole = client.chat.completions.create(model=name, **ASK).usage
            *_, last = client.chat.completions.create(
                model=name, stream=True, stream_options={"include_usage": True}, **ASK
            )
            assert whole is not None
            assert last.usage is not None
            assert last.usage.completion_tokens == whole.completion_tokens
            told[name] = [2, 2 * whole.prompt_tokens, 2 * whole.completion_tokens]

        def billed() -> dict[str, list[int]]:
            rows = fleet.cli("usage", "--by", "tenant,adapter", "--json")
            return {
                row["adapter"]: [row["requests"], row["prompt_tokens"], row["completion_tokens"]]
                for row in rows
                if row["tenant"] == "counted"
            }

        eventually(lambda: billed() == told)
        fleet.cli("tenant", "set", "counted", "--requests-per-min", "1")

        def refused_at_last() -> bool:
            try:
                chat(client, "shout", max_tokens=1)
            except openai.RateLimitError as refused:
                return float(refused.response.headers["retry-after"]) > 0
            return False

        eventually(refused_at_last)  # the servers have room: it is the tenant's own limit


def test_a_servers_refusal_is_an_openai_error(acme: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        chat(acme, "pirate", temperature=-1)
    body: Any = bad.value.body
    assert body["type"] == "invalid_request_error"
    assert body["code"] is None or isinstance(body["code"], str)
    assert "temperature" in body["message"]
    assert "@" not in body["message"], "no server's name of an adapter is told"
    with pytest.raises(openai.BadRequestError):
        chat(acme, "pirate", max_tokens=5000)


def test_the_rest_of_a_request_reaches_the_server(acme: openai.OpenAI) -> None:
    raw = acme.chat.completions.create(
        model="pirate", logprobs=True, top_logprobs=2, stop=["!"], extra_body={"top_k": 1}, **ASK
    )
    choice = raw.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Arrr", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content[0].top_logprobs) == 2


def test_a_server_killed_mid_stream_is_done_without_and_given_everything_when_it_is_back(
    fleet: Gateway, acme: openai.OpenAI, servers: dict[str, Process]
) -> None:
    expected, home = chat(acme, "pirate")
    victim = servers[home]
    with pytest.raises(openai.APIError, match="connection to the replica was lost"):
        stream_until_killed(acme, victim)
    answers: list[tuple[str, str]] = []
    enough = Event()

    def ask_on() -> None:
        while not enough.wait(2):  # the server that starts needs the machine too
            answers.append(chat(acme, "pirate"))

    client = Thread(target=ask_on)
    client.start()
    try:
        eventually(lambda: len(answers) > 1, within_s=60)
        assert {replica for _, replica in answers} == set(servers) - {home}
        victim.start()
        victim.ready()
        eventually(lambda: answers[-1][1] == home, within_s=120)
    finally:
        enough.set()
        client.join()
    assert {text for text, _ in answers} == {expected}, "all were answered, and rightly"
    assert len(listed(victim)) == len(ADAPTERS)
    calls = re.findall(r'"POST (\S+) HTTP/1.1" (\d+)', victim.log.read_text())
    loads = [at for at, call in enumerate(calls) if call[0] == "/v1/load_lora_adapter"]
    asked = [at for at, call in enumerate(calls) if call[0] == "/v1/chat/completions"]
    assert len(loads) == len(ADAPTERS)
    assert {status for _, status in calls} == {"200"}, "it was asked for what it had"
    assert loads[0] < asked[0]

    def cut() -> bool:
        rows = fleet.cli("usage", "--by", "tenant,replica", "--json")
        return any(row["replica"] == home and row["cut"] == 1 for row in rows)

    eventually(cut)


def stream_until_killed(client: openai.OpenAI, victim: Process) -> None:
    body: dict[str, Any] = {**ASK, "max_tokens": 400, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(model="pirate", stream=True, **body) as stream:
        for count, _ in enumerate(stream):
            if count == 3:
                victim.kill()
