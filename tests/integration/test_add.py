"""`loraplex adapter add` on a real replica of ours: the calls that vLLM has, over a whole fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from local_fleet import RunningFleet, eventually, running


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two adapters that load in no time; their text is noise, and differs."""
    from replica.engine.tiny import tiny_adapter, tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_model(folder / "base")
    for seed, name in enumerate(("one", "two"), start=1):
        tiny_adapter(folder / "adapters" / name, model, seed=seed)
    return folder


@pytest.fixture(scope="module")
def fleet(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    data = tmp_path_factory.mktemp("data")
    with running(data, tiny / "base", tiny / "adapters", "--replicas", "1") as fleet:
        yield fleet


def said(fleet: RunningFleet, model: str) -> tuple[str, str]:
    """Greedy, and the version that said it."""
    ask: dict[str, Any] = {"prompt": "once", "max_tokens": 8, "temperature": 0}
    with fleet.client() as client:
        raw = client.completions.with_raw_response.create(model=model, **ask)
    return raw.parse().choices[0].text, raw.headers["x-loraplex-adapter-version"]


def test_an_added_adapter_is_loaded_replaced_loaded_again_after_a_kill_and_removed(
    fleet: RunningFleet, tiny: Path
) -> None:
    base, adapters = str(tiny / "base"), tiny / "adapters"
    one, two = said(fleet, "one"), said(fleet, "two")
    assert one[0] != two[0]
    for name, expected in (("one", one), ("two", two)):
        shown = fleet.cli("adapter", "add", "new", str(adapters / name), "--base", base, "--json")
        assert [place["replica"] for place in shown["places"]] == ["replica-0"]
        assert said(fleet, "new") == expected
    fleet.cli("adapter", "rollback", "new", "--yes")
    eventually(lambda: _said(fleet, "new") == one)

    os.kill(fleet.pid("replica-0"), signal.SIGKILL)
    eventually(lambda: _said(fleet, "new") == one, within_s=60)

    explained = fleet.cli("explain", "--tenant", "acme", "--model", "new", "--json")
    assert [row["inferred"] for row in explained["candidates"]] == [False]
    fleet.cli("adapter", "remove", "new", "--yes")
    with pytest.raises(openai.NotFoundError):
        said(fleet, "new")
    assert said(fleet, "one") == one, "what its store lists of its own stays"


def _said(fleet: RunningFleet, model: str) -> tuple[str, str] | None:
    """None while it cannot."""
    try:
        return said(fleet, model)
    except openai.APIStatusError:
        return None
