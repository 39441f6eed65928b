"""The process: its arguments, its ready line, its ports, and how it stops."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import yaml
from click.testing import Result
from scripted import BASE, ScriptedReplica, chunks, read_reply, until
from typer.testing import CliRunner

from gateway.__main__ import cli
from gateway.config import GatewayConfig
from shared.settings import load

ASK = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
ADMIN = {"authorization": "Bearer admin-secret"}


def command(*arguments: str) -> Result:
    """The command in this process: what it does before it serves."""
    return CliRunner().invoke(cli, arguments)


class Process:
    """A gateway in a process of its own, with one tenant."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.http = httpx.AsyncClient(base_url=url, timeout=20, verify=False)
        self.url = url
        self.key = ""

    async def ready(self) -> None:
        for _ in range(200):
            if (await self.http.get("/readyz")).status_code == 200:
                break
            await asyncio.sleep(0.05)
        made = await self.http.post("/admin/v1/tenants", json={"id": "acme"}, headers=ADMIN)
        assert made.status_code == 201, made.text
        key = await self.http.post("/admin/v1/tenants/acme/keys", headers=ADMIN)
        self.key = key.json()["secret"]
        self.http.headers["authorization"] = f"Bearer {self.key}"

    async def stream(self) -> asyncio.StreamReader:
        """A stream that has begun, on a raw socket."""
        host, port = self.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps({**ASK, "stream": True})
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (self.key.encode(), len(body), body)
        )
        self.writer = writer
        return reader

    def kill(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.process.pid, number)

    async def ended(self) -> int:
        async with asyncio.timeout(10):
            return await self.process.wait()


@asynccontextmanager
async def running(
    replica: ScriptedReplica, store: str, folder: Path, **sections: Any
) -> AsyncIterator[Process]:
    await replica.start()
    config = {
        "listen": {"port": 0},
        "admin": {"key": "admin-secret"},
        "store": {
            "url": store,
            "prefix": f"{folder.name}:",
            "spool": str(folder / "spool"),
            "timeout_s": 2,
        },
        "fleet": {"replicas": [{"id": replica.name, "url": replica.url}]},
        **sections,
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "--config", str(path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("loraplex gateway ready on http://127.0.0.1:")
        it = Process(process, line.split()[-1])
        async with it.http:
            await it.ready()
            yield it
            if process.returncode is None:
                process.terminate()
                await it.ended()
            assert await process.stdout.read() == b"", "one line on stdout and no more"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await replica.stop()


async def test_sigterm_lets_streams_finish_and_takes_nothing_new(valkey_url, tmp_path) -> None:
    one = ScriptedReplica("replica-0")
    async with running(one, valkey_url, tmp_path) as it:
        one.speak.clear()
        reader = await it.stream()
        await until(lambda: one.received)
        it.kill()
        for _ in range(100):
            if (await it.http.get("/readyz")).json()["draining"]:
                break
        assert (await it.http.get("/readyz")).status_code == 503
        assert (await it.http.get("/healthz")).status_code == 200
        refused = await it.http.post("/v1/chat/completions", json=ASK)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "server_shutting_down"
        assert it.process.returncode is None
        one.speak.set()
        _, _, parts = await read_reply(reader)
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        assert await it.ended() == 0
        it.writer.close()


@pytest.mark.parametrize("how", ["second signal", "deadline"])
async def test_what_outlives_the_drain_ends_with_an_error_event(
    valkey_url, tmp_path, how: str
) -> None:
    async def forever(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        await response.write(chunks(BASE)[0])
        await asyncio.Event().wait()
        return response

    one = ScriptedReplica("replica-0")
    one.answer = forever
    drain_s = 60 if how == "second signal" else 0.3
    async with running(one, valkey_url, tmp_path, forward={"drain_s": drain_s}) as it:
        reader = await it.stream()
        await until(lambda: one.received)
        await asyncio.sleep(0.1)
        it.kill()
        if how == "second signal":
            await asyncio.sleep(0.2)
            it.kill()
        _, _, parts = await read_reply(reader)
        assert parts[0] == chunks(BASE)[0]
        last = orjson.loads(parts[-1].removeprefix(b"data: "))
        assert last["error"]["code"] == "server_shutting_down"
        assert await it.ended() == 0
        await until(lambda: one.left, within_s=1)
        it.writer.close()


async def test_a_finished_requests_record_survives_the_stop(valkey_url, tmp_path) -> None:
    one = ScriptedReplica("replica-0")
    async with running(one, valkey_url, tmp_path) as it:
        assert (await it.http.post("/v1/chat/completions", json=ASK)).status_code == 200
        it.kill()
        assert await it.ended() == 0
    again = ScriptedReplica("replica-0")
    async with running_again(again, valkey_url, tmp_path) as http:
        usage = await http.get("/admin/v1/usage", headers=ADMIN)
        (row,) = usage.json()["data"]
        assert (row["requests"], row["prompt_tokens"], row["ok"]) == (1, 7, 1)


@asynccontextmanager
async def running_again(
    replica: ScriptedReplica, store: str, folder: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """The same fleet after a restart, in this process; its tenant exists already."""
    from gateway.app import Gateway

    await replica.start()
    fleet = {"replicas": [{"id": replica.name, "url": replica.url}]}
    config = load(GatewayConfig, folder / "gateway.yaml")
    gateway = Gateway(
        GatewayConfig.model_validate(config.model_dump() | {"fleet": fleet, "listen": {"port": 0}})
    )
    await gateway.start()
    async with httpx.AsyncClient(base_url=gateway.url, verify=False) as http:
        yield http
    await gateway.close()
    await replica.stop()


async def test_the_admin_port_may_be_its_own(fleet) -> None:
    admin = {"key": "admin-secret", "port": 0}
    async with fleet(ScriptedReplica("replica-0"), admin=admin) as it:
        assert it.gateway.admin_url != it.url
        inside = await it.http.get(f"{it.gateway.admin_url}/admin/v1/tenants", headers=ADMIN)
        assert inside.status_code == 200
        outside = await it.http.get("/admin/v1/tenants", headers=ADMIN)
        assert outside.status_code == 404


async def test_what_is_not_http_gets_an_openai_error(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        host, port = it.url.removeprefix("http://").split(":")
        for wire in (
            b"NOT HTTP AT ALL\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-length: 5\r\ncontent-length: 7\r\n\r\nhello",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(wire)
            status, headers, parts = await read_reply(reader)
            assert status.startswith(b"HTTP/1.1 400") or status.startswith(b"HTTP/1.0 400")
            assert headers[b"content-type"].startswith(b"application/json")
            error = orjson.loads(parts[0])["error"]
            assert error["type"] == "invalid_request_error"
            assert "not a valid HTTP request" in error["message"]
            writer.close()


async def test_expect_100_continue_is_answered(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        host, port = it.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = orjson.dumps({**ASK, "stream": True})
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (it.key.encode(), len(body))
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        status, _, parts = await read_reply(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")
        writer.close()


def test_help_shows_an_example() -> None:
    done = command("--help")
    assert done.exit_code == 0
    assert "Example: python -m gateway" in done.stdout
    for option in ("--config", "--port", "--workers", "--check-config", "--example-config"):
        assert option in done.stdout


def test_the_example_configuration_is_right(tmp_path) -> None:
    example = command("--example-config")
    assert example.exit_code == 0
    path = tmp_path / "gateway.yaml"
    path.write_text(example.stdout)
    assert command("--config", str(path), "--check-config").exit_code == 0
    assert load(GatewayConfig, path, {}) == GatewayConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("listen: {prot: 1}", "listen.prot"),
        ("queue: {ttl_s: -1}", "queue.ttl_s"),
        ("fleet: {replicas: [{id: a, url: 'replica:8000'}]}", "http://HOST:PORT"),
        (
            "fleet: {replicas: [{id: a, url: 'http://x'}, {id: a, url: 'http://y'}]}",
            "two replicas are named 'a'",
        ),
        ("- a list", "mapping"),
    ],
)
def test_a_wrong_configuration_is_told_with_its_key(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    done = command("--config", str(path), "--check-config")
    assert done.exit_code == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_taken_port_ends_the_process_with_a_reason(fleet, tmp_path) -> None:
    async with fleet(ScriptedReplica("replica-0")) as it:
        port = it.url.rsplit(":", 1)[1]
        path = tmp_path / "gateway.yaml"
        path.write_text(f"store: {{url: 'redis://127.0.0.1:1/0', spool: {tmp_path}/spool2}}")
        arguments = [sys.executable, "-m", "gateway", "--config", str(path), "--port", port]
        done = await asyncio.to_thread(
            subprocess.run, arguments, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        assert "cannot listen" in done.stderr
        assert done.stdout == ""
