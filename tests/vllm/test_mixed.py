"""One of our replicas and a vLLM server behind one gateway: one set of adapters for both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from local_fleet import eventually
from vllm_pool import HOST_SLOTS, Gateway, Process, gateway, native

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

ADAPTERS = {"french": "french", "pirate": "pirate", "shout": "shout", "corsair": "pirate"}
"""By name, the folder: our replica finds three by itself, and is given the fourth."""
QUESTIONS = ("Describe the sea.", "What is the capital of France?")


@pytest.fixture(scope="module")
def ours(folder: Path, real_base: Path, adapters: Path) -> Iterator[Process]:
    one = native("ours", real_base, adapters, folder)
    one.start()
    try:
        one.ready()
        yield one
    finally:
        one.kill()


@pytest.fixture(scope="module")
def fleet(
    valkey_url: str,
    folder: Path,
    servers: dict[str, Process],
    ours: Process,
    adapters: Path,
    real_base: Path,
) -> Iterator[Gateway]:
    theirs = servers["v1"]
    entries = [
        {"id": "ours", "url": ours.url},
        {"id": "theirs", "url": theirs.url, "kind": "vllm", "host_slots": HOST_SLOTS},
    ]
    with gateway(valkey_url, folder, entries) as it:
        eventually(lambda: it.up() == {"ours", "theirs"})
        for name, at in ADAPTERS.items():
            it.cli("adapter", "add", name, str(adapters / at), "--base", str(real_base))
        for name in ADAPTERS:
            eventually(lambda name=name: set(it.places(name)) == {"ours", "theirs"})  # type: ignore[misc]
        yield it


@pytest.fixture(scope="module")
def mixed(fleet: Gateway) -> Iterator[openai.OpenAI]:
    with fleet.tenant("mixed") as client:
        yield client


def answers(client: openai.OpenAI, models: list[str], replica: str) -> dict[tuple[str, str], Any]:
    """Greedy, one after the other: in a batch that mixes adapters and base rows vLLM's CPU build
    gives base rows an adapter."""
    found = {}
    for model in models:
        for question in QUESTIONS:
            raw = client.chat.completions.with_raw_response.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                max_tokens=24,
                temperature=0,
            )
            assert raw.headers["x-loraplex-replica"] == replica
            reply = raw.parse()
            assert reply.usage is not None
            choice = reply.choices[0]
            counts = (reply.usage.prompt_tokens, reply.usage.completion_tokens)
            found[model, question] = choice.message.content, choice.finish_reason, counts
    return found


def test_both_say_the_same_to_the_letter(
    fleet: Gateway, mixed: openai.OpenAI, real_base: Path
) -> None:
    said = {}
    for replica, other in (("ours", "theirs"), ("theirs", "ours")):
        fleet.cli("replica-set", "drain", other)
        said[replica] = answers(mixed, [real_base.name, *ADAPTERS], replica)
        fleet.cli("replica-set", "resume", other)
        eventually(lambda: fleet.up() == {"ours", "theirs"})
    assert said["ours"] == said["theirs"]
    assert len({text for text, _, _ in said["ours"].values()}) == 4 * len(QUESTIONS)


def test_explain_tells_what_was_measured_from_what_was_inferred(fleet: Gateway) -> None:
    for name in ADAPTERS:
        told = fleet.cli("explain", "--tenant", "mixed", "--model", name, "--json")
        inferred = {row["replica"]: row["inferred"] for row in told["candidates"]}
        assert inferred == {"ours": False, "theirs": True}
        shown = fleet.cli("explain", "--tenant", "mixed", "--model", name).splitlines()
        lines = {word: line for line in shown for word in ("ours", "theirs") if word in line}
        assert "(inferred)" in lines["theirs"]
        assert "(inferred)" not in lines["ours"]


def test_what_is_removed_leaves_both(fleet: Gateway, mixed: openai.OpenAI) -> None:
    fleet.cli("adapter", "remove", "corsair", "--yes")
    assert "corsair" not in {one["adapter"] for one in fleet.cli("adapter", "list", "--json")}
    with pytest.raises(openai.NotFoundError):
        answers(mixed, ["corsair"], "ours")
