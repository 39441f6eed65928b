"""What operators look at, asked of a real Prometheus after a real load."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from local_fleet import RunningFleet, eventually

pytestmark = pytest.mark.observe

ROOT = Path(__file__).parents[2]
BOARDS = sorted((ROOT / "helm/dashboards").glob("*.json"))
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((ROOT / "helm/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
OF_TROUBLE = {
    "LoraplexStoreDegraded",
    "LoraplexLedgerLag",
    "LoraplexLedgerLost",
    "LoraplexReplicaLost",
    "LoraplexFleetNotFollowed",
    "LoraplexFleetTooLarge",
    "LoraplexAdapterFailed",
}
"""What no load may raise, however heavy."""


def expressions(board: Path) -> list[str]:
    panels = json.loads(board.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def metrics_in(expr: str) -> set[str]:
    names = re.findall(r"\b(?:loraplex_|vllm:)\w+", expr)
    return {re.sub(r"_(bucket|count|sum|total)$", "", name) for name in names}


def load(fleet: RunningFleet, seconds: float, adapters: int, clients: int = 4) -> int:
    """Streams of a few tokens to one adapter after another; how many were answered in full."""
    from time import monotonic, sleep

    done: list[int] = []
    key = fleet.key("acme")

    def client(first: int) -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=30) as http:
            number, end = first, monotonic() + seconds
            while monotonic() < end:
                body = {"model": f"tuned-{number % adapters}", "prompt": "a b c", "max_tokens": 6}
                body |= {"stream": True, "ignore_eos": True}
                reply = http.post(f"{fleet.url}/v1/completions", json=body)
                done.append(reply.text.endswith("[DONE]\n\n"))
                number += clients
                sleep(0.01)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done)


@pytest.fixture(scope="module")
def loaded(fleet: RunningFleet, prometheus: Any) -> Any:
    fleet.cli("tenant", "set", "acme", "--requests-per-min", "0")
    assert (
        httpx.post(
            f"{fleet.url}/v1/completions",
            json={"model": "tuned-0", "prompt": "a"},
            headers={"Authorization": f"Bearer {fleet.key('acme')}"},
        ).status_code
        == 429
    )
    fleet.cli("tenant", "set", "acme", "--requests-per-min", "none", "--tokens-per-min", "none")
    eventually(lambda: load(fleet, 0.5, 14) > 0)
    assert load(fleet, 20, 14) > 50
    return prometheus


@pytest.mark.parametrize("board", BOARDS, ids=lambda path: path.stem)
def test_every_panel_of_a_dashboard_shows_something(
    board: Path, fleet: RunningFleet, loaded: Any
) -> None:
    assert load(fleet, 3, 14) > 0  # a share of nothing is no number: on a slow machine it was so
    for expr in expressions(board):
        asked = re.sub(r'"\$\w+"', '".*"', expr).replace("$__rate_interval", "30s")
        values = loaded.query(asked)
        assert values, asked
        assert all(math.isfinite(value) for value in values), (asked, values)


def test_every_metric_that_is_looked_at_is_one_that_the_programs_declare(
    fleet: RunningFleet, loaded: Any
) -> None:
    declared = set()
    for address in [fleet.url, *(f"http://{host}" for host in replica_hosts(fleet))]:
        text = httpx.get(f"{address}/metrics").text
        declared |= {re.sub(r"_total$", "", n) for n in re.findall(r"^# TYPE (\S+)", text, re.M)}
    every = [*ALERTS.values(), *(expr for board in BOARDS for expr in expressions(board))]
    assert {name for expr in every for name in metrics_in(expr)} <= declared


def replica_hosts(fleet: RunningFleet) -> list[str]:
    text = (fleet.data / "run" / "gateway.yaml").read_text()
    return re.findall(r"url: http://(127\.0\.0\.1:\d+)", text)


def test_no_alert_of_trouble_fires_while_there_is_none(loaded: Any) -> None:
    assert OF_TROUBLE.issubset(ALERTS)
    assert not loaded.firing() & OF_TROUBLE


def test_thrash_and_a_lost_replica_fire_live(fleet: RunningFleet, loaded: Any) -> None:
    assert load(fleet, 20, 14, clients=6) > 50
    eventually(lambda: "LoraplexThrash" in loaded.firing(), 10)
    os.kill(fleet.pid("replica-1"), signal.SIGKILL)
    eventually(lambda: "LoraplexReplicaLost" in loaded.firing(), 20)
    eventually(lambda: "LoraplexReplicaLost" not in loaded.firing(), 60)  # `up` started it again
