"""Real fleets: `loraplex up` as a person starts it, on free ports and a data folder of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from typer.testing import CliRunner

from gateway.cli.failure import Failure
from gateway.cli.root import app

START_S = 150.0
END_S = 60.0


@dataclass(frozen=True, slots=True)
class RunningFleet:
    """What a person sees of it: an URL, keys, a data folder, what `up` says."""

    url: str
    base: str
    data: Path
    adapters: Path
    process: subprocess.Popen[str]
    said: Path  # what `up` wrote to stderr

    def key(self, tenant: str = "acme") -> str:
        keys: str = json.loads((self.data / "keys.json").read_text())["tenants"][tenant]
        return keys

    @property
    def admin(self) -> str:
        key: str = json.loads((self.data / "keys.json").read_text())["admin"]
        return key

    def client(self, tenant: str = "acme", **settings: Any) -> openai.OpenAI:
        """Without retries: what fails is to be seen. Close it (`with`)."""
        settings = {"max_retries": 0, "timeout": 120, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key(tenant), **settings)

    def cli(self, *words: str, code: int = 0, typed: str = "") -> Any:
        """Output of a `loraplex` command against this fleet; parsed when it asked for JSON.

        In this process: starting Python and importing the command line takes longer than most
        commands do.
        """
        here = {"LORAPLEX_DATA": str(self.data)}
        result = CliRunner().invoke(app, list(words), input=typed, env=here)
        failure, output = result.exception, result.output
        if isinstance(failure, Failure):
            result.exit_code, output = failure.code, str(failure)
        assert result.exit_code == code, (output, failure)
        return json.loads(result.stdout) if "--json" in words else output

    def pid(self, replica: str) -> int:
        """The process of a replica of this fleet."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode().split("\0")
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it has just ended
                continue
            if replica in words and int(parent) == self.process.pid:
                return int(process.name)
        raise AssertionError(f"{replica} does not run")


LORAPLEX = (sys.executable, "-c", "from gateway.cli import main; main()")


def eventually(true: Callable[[], object], within_s: float = 30.0) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.1)


@contextmanager
def running(
    data: Path, base: Path, adapters: Path, *options: str, ends: int | None = 0
) -> Iterator[RunningFleet]:
    """`loraplex up`; afterwards Ctrl-C, which must end it with the exit code `ends`."""
    data.mkdir(parents=True, exist_ok=True)
    said = data / "said.txt"
    words = ["up", "--port", "0", "--data-dir", str(data)]
    words += ["--base", str(base), "--adapters", str(adapters), *options]
    with said.open("a") as errors:
        process = subprocess.Popen(
            [*LORAPLEX, *words], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("loraplex ready on "), said.read_text()
        url = ready.split()[-1]
        yield RunningFleet(url, base.name, data, adapters, process, said)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        code = process.wait(END_S)
        assert ends is None or code == ends, said.read_text()
    finally:
        process.kill()  # what it started is told by the kernel
        process.communicate()
