"""Real vLLM servers on this machine's CPU, one of our replicas, and a gateway before them.

Each is a process as an operator starts it, in a group of its own: vLLM's API server leaves its
engine behind when it alone is killed, so what is killed here is the group, as a lost machine is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import openai
import yaml
from local_fleet import eventually
from typer.testing import CliRunner

from gateway.cli.failure import Failure
from gateway.cli.root import app

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
ADMIN_KEY: Final = "operators-only-0123456789"
START_S: Final = 480.0
"""Two at once, on a machine that does other things as well."""

SLOTS, HOST_SLOTS = 2, 4

_ENVIRONMENT: Final = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server takes the first core
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@dataclass
class Process:
    """One server and all it starts; what it says is kept, a file a life."""

    name: str
    words: list[str]
    folder: Path
    environment: Mapping[str, str]
    port: int = field(default_factory=free_port)
    lives: int = 0
    _running: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.lives += 1
        with self.log.open("wb") as log:
            self._running = subprocess.Popen(
                [*self.words, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                start_new_session=True,
            )

    @property
    def log(self) -> Path:
        """Of this life."""
        return self.folder / f"{self.name}-{self.lives}.log"

    def ready(self) -> None:
        """Wait until it answers."""

        def healthy() -> bool:
            assert self._running is not None
            assert self._running.poll() is None, self.log.read_text()[-3000:]
            try:
                return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
            except httpx.TransportError:
                return False

        eventually(healthy, within_s=START_S)

    def kill(self) -> None:
        """SIGKILL, all of it."""
        if self._running is not None:
            os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
            self._running = None


def vllm(name: str, base: Path, folder: Path) -> Process:
    words = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]  # no `vllm` command there
    words += ["--model", str(base), "--served-model-name", base.name, "--dtype", "float32"]
    words += ["--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
    words += ["--enable-lora", "--max-lora-rank", "16"]
    words += ["--max-loras", str(SLOTS), "--max-cpu-loras", str(HOST_SLOTS)]
    here = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return Process(name, words, folder, here | _ENVIRONMENT)


def native(name: str, base: Path, adapters: Path, folder: Path) -> Process:
    words = [sys.executable, "-m", "replica", "--base", str(base), "--adapters", str(adapters)]
    words += ["--name", name, "--threads", "1", "--max-loras", str(SLOTS)]
    return Process(name, words, folder, os.environ)


@dataclass(frozen=True)
class Gateway:
    """What its operator and its tenants see."""

    url: str

    def cli(self, *words: str, code: int = 0) -> Any:
        """Output of a `loraplex` command; parsed when it asked for JSON."""
        here = {"LORAPLEX_ADMIN_KEY": ADMIN_KEY, "LORAPLEX_GATEWAY": self.url}
        result = CliRunner(env=here).invoke(app, list(words))
        failure, output = result.exception, result.output
        if isinstance(failure, Failure):
            result.exit_code, output = failure.code, str(failure)
        assert result.exit_code == code, (output, failure)
        return json.loads(result.stdout) if "--json" in words else output

    @contextmanager
    def tenant(self, name: str, *options: str) -> Iterator[openai.OpenAI]:
        """A client of a new tenant's."""
        self.cli("tenant", "create", name, *options)
        secret = self.cli("tenant", "key-create", name, "--json")["secret"]
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=secret, max_retries=0, timeout=120
        ) as client:
            eventually(lambda: _lists(client))
            yield client

    def places(self, adapter: str) -> dict[str, dict[str, Any]]:
        """By replica, where it is routed."""
        shown = self.cli("adapter", "show", adapter, "--json")
        return {one["replica"]: one for one in shown["places"] if one["status"] == "ready"}

    def up(self) -> set[str]:
        rows = self.cli("replica-set", "list", "--json")
        return {row["replica"] for row in rows if row["state"] == "up"}


def _lists(client: openai.OpenAI) -> bool:
    """The gateway has heard of its key."""
    try:
        return bool(client.models.list().data)
    except openai.AuthenticationError:
        return False


@contextmanager
def gateway(store: str, folder: Path, replicas: list[dict[str, Any]]) -> Iterator[Gateway]:
    """`python -m gateway`, whose tenants and adapters are those that the store has."""
    config = {
        "listen": {"port": 0},
        "admin": {"key": ADMIN_KEY},
        "store": {"url": store, "prefix": "vllm:", "spool": str(folder / "spool")},
        "fleet": {"replicas": replicas},
    }
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(config))
    with (folder / "gateway.log").open("ab") as log, ExitStack() as stack:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "--config", str(file)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("loraplex gateway ready on "), ready
        yield Gateway(ready.split()[-1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
