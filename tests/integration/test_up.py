"""The life of `loraplex up`: it starts, keeps its parts alive, drains, and says what is wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import pytest
from local_fleet import LORAPLEX, RunningFleet, eventually, running

from gateway.config import GatewayConfig
from shared import settings

TOKENS = 2000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and one adapter that load in no time; their text is noise."""
    from replica.engine.tiny import tiny_adapter, tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    tiny_adapter(folder / "adapters" / "small", tiny_model(folder / "base", context=2 * TOKENS))
    return folder


class Stream(threading.Thread):
    """A client with a stream of some seconds; `lines` is what it got of it."""

    def __init__(self, fleet: RunningFleet) -> None:
        super().__init__()
        self._fleet = fleet
        self.lines: list[str] = []

    def run(self) -> None:
        body = {"model": self._fleet.base, "prompt": "a", "max_tokens": TOKENS}
        url = f"{self._fleet.url}/v1/completions"
        headers = {"Authorization": f"Bearer {self._fleet.key()}"}
        body |= {"stream": True, "ignore_eos": True}
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as reply:
                self.lines += (line for line in reply.iter_lines() if line)
        except httpx.TransportError:
            pass

    def begun(self) -> bool:
        return len(self.lines) > 0


def test_it_prints_what_one_needs_drains_on_ctrl_c_and_keeps_its_keys(
    tiny: Path, tmp_path: Path
) -> None:
    with running(tmp_path, tiny / "base", tiny / "adapters", "--replicas", "1") as fleet:
        assert fleet.process.stdout is not None
        card = [fleet.process.stdout.readline() for _ in range(14)]
        first = {tenant: fleet.key(tenant) for tenant in ("acme", "globex")}
        assert all(any(key in line for line in card) for key in first.values())
        curl = next(line for line in card if "curl " in line)
        done = subprocess.run(curl, shell=True, capture_output=True, text=True, check=True)
        assert '"choices"' in done.stdout
        client = Stream(fleet)
        client.start()
        eventually(client.begun)
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(60) == 0
        client.join()
        assert client.lines[-1] == "data: [DONE]"  # what ran was finished
    assert not (tmp_path / "run" / "fleet.json").exists()
    order = [fleet.said.read_text().index(f"draining the {part}") for part in ("gateway", "repl")]
    assert order == sorted(order)
    with running(tmp_path, tiny / "base", tiny / "adapters", "--replicas", "1") as fleet:
        assert {tenant: fleet.key(tenant) for tenant in first} == first
        used = fleet.cli("usage", "--json")  # the ledger is where it was
        assert sum(row["requests"] for row in used) == 2


def test_a_second_signal_ends_at_once(tiny: Path, tmp_path: Path) -> None:
    adapters = tiny / "adapters"
    with running(tmp_path, tiny / "base", adapters, "--replicas", "1", ends=None) as fleet:
        replica = fleet.pid("replica-0")
        client = Stream(fleet)
        client.start()
        eventually(client.begun)
        os.kill(replica, signal.SIGSTOP)  # a stream that cannot end
        fleet.process.send_signal(signal.SIGINT)
        eventually(lambda: "draining the gateway" in fleet.said.read_text())
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.wait(10) == 130
        client.join()
        assert not Path(f"/proc/{replica}").exists()


def ready(fleet: RunningFleet) -> bool:
    try:
        return httpx.get(f"{fleet.url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def test_a_gateway_comes_back_where_it_was_and_a_hopeless_replica_ends_the_fleet(
    tiny: Path, tmp_path: Path
) -> None:
    base, broken = tiny / "base", tmp_path / "base"
    with running(tmp_path / "data", base, tiny / "adapters", "--replicas", "1", ends=None) as fleet:
        os.kill(fleet.pid("gateway"), signal.SIGKILL)
        eventually(lambda: "gateway was killed by SIGKILL" in fleet.said.read_text())
        eventually(lambda: ready(fleet))
        replica = fleet.pid("replica-0")
        base.rename(broken)  # so that no start succeeds from now on
        try:
            os.kill(replica, signal.SIGKILL)
            assert fleet.process.wait(120) == 1
        finally:
            broken.rename(base)
    said = fleet.said.read_text()
    assert "replica-0 was killed by SIGKILL; starting it again in 0.5 s" in said
    assert "replica-0 died 5 times in a row" in said
    assert "The end of" in said


def valkey(fleet: RunningFleet) -> int:
    return int((fleet.data / "store" / "lock").read_text())


def tokens_left(fleet: RunningFleet) -> int:
    """After one small request more."""
    reply = httpx.post(
        f"{fleet.url}/v1/completions",
        json={"model": fleet.base, "prompt": "a", "max_tokens": 1},
        headers={"Authorization": f"Bearer {fleet.key()}"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    return int(reply.headers["x-ratelimit-remaining-tokens"])


def test_a_killed_valkey_comes_back_with_tenants_and_quotas(tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    example = settings.example(GatewayConfig)  # with which, as printed, `up` has to start
    config.write_text(example.replace("timeout_s: 0.05", "timeout_s: 1"))
    words = ("--replicas", "1", "--config", str(config))
    with running(tmp_path / "data", tiny / "base", tiny / "adapters", *words) as fleet:
        # 42 tokens come back each second: most of what is spent stays spent while the test lasts
        fleet.cli("tenant", "set", "acme", "--tokens-per-min", "2500")
        client = Stream(fleet)
        client.start()
        client.join()
        assert tokens_left(fleet) < 1300
        first = valkey(fleet)
        os.kill(first, signal.SIGKILL)
        eventually(lambda: "Valkey is ready again" in fleet.said.read_text())
        assert "Valkey was killed by SIGKILL; starting it again in 0.5 s" in fleet.said.read_text()
        assert valkey(fleet) != first
        eventually(lambda: not httpx.get(f"{fleet.url}/readyz").json()["degraded"])
        assert tokens_left(fleet) < 2300  # a forgotten bucket would be full
        fleet.cli("tenant", "set", "acme", "--weight", "3")
        assert fleet.cli("tenant", "show", "acme", "--json")["weight"] == 3


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_starts_leaves_nothing_behind(
    tiny: Path, tmp_path: Path, signal_number: signal.Signals
) -> None:
    words = ["up", "--port", "0", "--data-dir", str(tmp_path), "--base", str(tiny / "base")]
    process = subprocess.Popen([*LORAPLEX, *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "replica" not in process.stderr.readline():
        pass
    process.send_signal(signal_number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--base", "/nowhere"), 2, "--base /nowhere: no such folder"),
        (("--adapters", "/nowhere"), 2, "--adapters /nowhere: no such folder"),
        (("--replicas", "0"), 2, "--replicas 0"),
        (("--port", "TAKEN"), 1, "choose another port with --port"),
        (("--data-dir", "/proc/nowhere"), 1, "cannot write to the data directory"),
    ],
)
def test_what_cannot_work_is_one_clear_line(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = tuple(port if word == "TAKEN" else word for word in words)
        asked = ["up", "--port", "0", "--data-dir", str(tmp_path), *words]
        done = subprocess.run([*LORAPLEX, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said.lower() in done.stderr.lower()
    assert len(done.stderr.splitlines()) == 1


def test_a_store_of_ones_own_that_is_not_there_is_named_before_a_replica_starts(
    tiny: Path, tmp_path: Path
) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(f"store: {{url: 'unix://me:hush@{tmp_path}/none.sock'}}")
    words = ["up", "--port", "0", "--data-dir", str(tmp_path), "--base", str(tiny / "base")]
    asked = [*LORAPLEX, *words, "--config", str(config)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert f"the store at unix://{tmp_path}/none.sock (store.url) cannot be reached" in error
    assert "remove store.url" in error
    assert "hush" not in error
