"""A fleet, and a real Prometheus that scrapes it; without one these tests are skipped."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from local_fleet import RunningFleet, eventually, running

ROOT = Path(__file__).parents[2]
WINDOW = "30s"
ADAPTERS = 14
"""More than the slots of both replicas: some must leave for others."""


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expr: str) -> list[float]:
        """The values of an instant query; one that Prometheus refuses fails the test."""
        reply = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=10)
        body: dict[str, Any] = reply.json()
        assert body["status"] == "success", (expr, body)
        result = body["data"]["result"]
        if body["data"]["resultType"] == "scalar":
            return [float(result[1])]
        return [float(one["value"][1]) for one in result]

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        reply = httpx.get(f"{self.url}/api/v1/alerts", timeout=10)
        alerts = reply.json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    from replica.engine.tiny import tiny_adapter, tiny_model

    folder = tmp_path_factory.mktemp("observe")
    config = tiny_model(folder / "base", context=4096)
    for number in range(ADAPTERS):
        tiny_adapter(folder / "adapters" / f"tuned-{number}", config, seed=number)
    with running(folder / "data", folder / "base", folder / "adapters") as fleet:
        yield fleet


@pytest.fixture(scope="session")
def prometheus(
    fleet: RunningFleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus here (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "alerts.yml").write_text(hastened((ROOT / "helm/alerts.yaml").read_text()))
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        "rule_files: [alerts.yml]\n"
        "scrape_configs:\n"
        f"  - job_name: gateway\n    static_configs: [{{targets: ['{_host(fleet.url)}']}}]\n"
        f"  - job_name: replica\n    static_configs: [{{targets: {replicas(fleet)}}}]\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/db"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            eventually(lambda: _ready(url))
            yield Prometheus(url)
        finally:
            process.terminate()


def hastened(rules: str) -> str:
    """The chart's own rules, by windows and waits that a test can sit through."""
    rules = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rules)
    return re.sub(r"\bfor: \d+m", "for: 2s", rules)


def replicas(fleet: RunningFleet) -> list[str]:
    """Where they listen: `up` wrote it into the gateway's file."""
    text = (fleet.data / "run" / "gateway.yaml").read_text()
    return [_host(url) for url in re.findall(r"url: (http://127\.0\.0\.1:\d+)", text)]


def _host(url: str) -> str:
    return url.removeprefix("http://").rstrip("/")


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False
