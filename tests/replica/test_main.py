"""The process as a supervisor sees it: one line when ready, SIGTERM drains, errors say why."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from s3_server import options

READY = re.compile(r"loraplex replica (\S+) ready on (http://\S+)\n")


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "replica", *map(str, arguments)]


@contextmanager
def _started(tiny: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LORAPLEX_DRAIN_S": "10"}
    command = _command(
        "--base", tiny / "base", "--adapters", tiny / "adapters", "--threads", 1, *arguments
    )
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            ready = READY.fullmatch(line)
            assert ready, (line, process.stderr and process.stderr.read())
            yield process, ready[2]
        finally:
            process.kill()


def test_it_is_ready_when_it_says_so_and_drains_on_sigterm(tiny: Path) -> None:
    with _started(tiny, "--name", "replica-7", "--max-loras", 2) as (process, url):
        with httpx.Client(base_url=url, timeout=30) as http:
            models = [model["id"] for model in http.get("/v1/models").json()["data"]]
            assert models[:2] == ["base", "ada"]
            assert http.get("/health").json()["replica"] == "replica-7"
            body = {"model": "ada", "prompt": "x", "max_tokens": 400, "ignore_eos": True}
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
                lines = reply.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = list(lines)
        assert "data: [DONE]" in rest
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert out == ""


def test_a_store_that_never_answers_keeps_it_neither_from_serving_nor_from_ending(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("LORAPLEX_ADAPTER_STORE_OPTIONS", json.dumps(options(endpoint)))
        store = ("--adapter-store", "s3://bucket/prefix", "--adapters", tmp_path)
        with _started(tiny, *store) as (process, url):
            body = {"model": "base", "prompt": "x", "max_tokens": 2}
            assert httpx.post(url + "/v1/completions", json=body, timeout=30).status_code == 200
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=10)
            assert process.returncode == 0, err


def test_a_second_sigterm_does_not_wait(tiny: Path) -> None:
    with _started(tiny) as (process, url):
        body = {"model": "ada", "prompt": "x", "ignore_eos": True, "n": 8}
        statuses: list[int] = []
        asking = threading.Thread(
            target=lambda: statuses.append(
                httpx.post(url + "/v1/completions", json=body, timeout=30).status_code
            )
        )
        asking.start()
        with httpx.Client(base_url=url) as http:
            while (
                'vllm:num_requests_running{model_name="base"} 8.0' not in http.get("/metrics").text
            ):
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while http.get("/health").json()["status"] != "draining":
                time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
        asking.join(10)
        assert process.returncode == 0
        assert statuses == [503]


def test_a_fault_in_the_settings_is_a_usage_error(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "replica.yaml"
    file.write_text(f"base: {tiny / 'base'}\nadapters: {tiny / 'adapters'}\nmax_lora: 3\n")
    run = subprocess.run(_command("--config", file), capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "max_lora: Extra inputs are not permitted" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_base_that_cannot_be_served_says_what_is_missing(tmp_path: Path) -> None:
    run = subprocess.run(
        _command("--base", tmp_path, "--adapters", tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "config.json" in run.stderr
    assert "Traceback" not in run.stderr


def test_help_has_an_example_and_the_example_config_loads(tmp_path: Path) -> None:
    run = subprocess.run(_command("--help"), capture_output=True, text=True, check=True)
    assert "python -m replica --base" in run.stdout
    for flag in ("--served-name", "--max-loras", "--max-lora-rank", "--max-cpu-loras", "--threads"):
        assert flag in run.stdout
    run = subprocess.run(_command("--example-config"), capture_output=True, text=True, check=True)
    assert yaml.safe_load(run.stdout)["max_loras"] == 4


def test_torch_is_loaded_after_the_settings_are_read() -> None:
    """OpenMP reads how its threads wait when it is loaded, and `--help` need not wait for it."""
    check = "import sys, replica.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
