"""Several workers on one port: one limit, one ready line, one signal; none is missed for long."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import yaml
from scripted import BASE, ScriptedReplica, read_reply, until

from gateway.config import GatewayConfig
from gateway.workers import _share

ASK = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
ADMIN = {"authorization": "Bearer admin-secret"}


def free_ports(many: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, many):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + many):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


class Workers:
    """A supervisor and its two workers."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, admin_port: int) -> None:
        self.process, self.url = process, url
        self.admin = [f"http://127.0.0.1:{admin_port + n}" for n in range(2)]
        self.http = httpx.AsyncClient(timeout=10, verify=False)
        self.key = ""

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    async def ready(self) -> None:
        for url in self.admin:
            await self.until_ready(url)
        made = await self.http.post(
            f"{self.admin[0]}/admin/v1/tenants",
            json={"id": "acme", "limits": {"requests_per_min": 10}},
            headers=ADMIN,
        )
        assert made.status_code == 201, made.text
        key = await self.http.post(f"{self.admin[1]}/admin/v1/tenants/acme/keys", headers=ADMIN)
        self.key = key.json()["secret"]

    async def until_ready(self, url: str) -> None:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await self.http.get(f"{url}/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    async def ask(self, **more: Any) -> httpx.Response:
        """On a connection of its own, so that the kernel chooses a worker."""
        async with httpx.AsyncClient(timeout=10, verify=False) as http:
            return await http.post(
                f"{self.url}/v1/chat/completions",
                json={**ASK, **more},
                headers={"authorization": f"Bearer {self.key}"},
            )

    async def usage(self) -> dict[str, Any]:
        usage = await self.http.get(f"{self.admin[0]}/admin/v1/usage", headers=ADMIN)
        (row,) = usage.json()["data"]
        return dict(row)

    async def draining(self, url: str) -> bool:
        return bool((await self.http.get(f"{url}/readyz")).json()["draining"])

    async def served(self) -> list[float]:
        """Requests that each worker has answered."""
        found = []
        for url in self.admin:
            text = (await self.http.get(f"{url}/metrics")).text
            lines = [line for line in text.splitlines() if 'outcome="ok"' in line]
            found.append(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
        return found


@asynccontextmanager
async def workers(replica: ScriptedReplica, store: str, folder: Path) -> AsyncIterator[Workers]:
    await replica.start()
    admin_port = free_ports(2)
    config = {
        "listen": {"port": 0},
        "admin": {"key": "admin-secret", "port": admin_port},
        "store": {
            "url": store,
            "prefix": f"{folder.name}:",
            "spool": str(folder / "spool"),
            "timeout_s": 2,
        },
        "fleet": {"replicas": [{"id": replica.name, "url": replica.url}]},
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "--config", str(path), "--workers", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("loraplex gateway ready on http://127.0.0.1:")
        it = Workers(process, line.split()[-1], admin_port)
        async with it.http:
            await it.ready()
            yield it
            if process.returncode is None:
                process.terminate()
            async with asyncio.timeout(15):
                assert await process.wait() == 0
                assert await process.stdout.read() == b"", "one line on stdout and no more"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await replica.stop()


async def test_two_workers_share_a_limit_a_port_and_a_spool_folder(valkey_url, tmp_path) -> None:
    one = ScriptedReplica("replica-0", capacity=64)
    async with workers(one, valkey_url, tmp_path) as it:
        await it.until_ready(it.url)
        answers = await asyncio.gather(*[it.ask() for _ in range(24)])
        statuses = [answer.status_code for answer in answers]
        # A token comes back every 6 s; however long this took, no worker had ten of its own.
        assert 10 <= statuses.count(200) <= 11
        assert statuses.count(429) == 24 - statuses.count(200)
        assert len(one.received) == statuses.count(200)
        served = await it.served()
        assert sum(served) == statuses.count(200)
        assert {path.name for path in tmp_path.glob("spool*")} >= {"spool", "spool.1"}
        async with asyncio.timeout(5):  # the other worker enters its own in a moment
            while (row := await it.usage())["requests"] < 24:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (row["ok"], row["requests"]) == (statuses.count(200), 24)
        shared = await it.http.get(f"{it.url}/metrics")
        assert shared.status_code == 404
        assert "admin.port" in shared.json()["error"]["message"]


async def test_a_killed_worker_is_replaced_and_the_other_serves_meanwhile(
    valkey_url, tmp_path
) -> None:
    async with workers(ScriptedReplica("replica-0"), valkey_url, tmp_path) as it:
        before = it.children()
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: before[0] not in it.children())
        for _ in range(5):
            assert (await it.http.get(f"{it.url}/healthz")).status_code == 200
        await until(lambda: len(it.children()) == 2, within_s=10)
        for url in it.admin:
            await it.until_ready(url)
        assert before[1] in it.children()
        assert (await it.ask()).status_code == 200
    assert not running(before)


async def test_one_sigterm_drains_every_worker(valkey_url, tmp_path) -> None:
    one = ScriptedReplica("replica-0")
    async with workers(one, valkey_url, tmp_path) as it:
        one.speak.clear()
        host, port = it.url.removeprefix("http://").split(":")
        body = orjson.dumps({**ASK, "stream": True})
        streams = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
                b"content-length: %d\r\n\r\n%b" % (it.key.encode(), len(body), body)
            )
            streams.append((reader, writer))
        await until(lambda: len(one.received) == 8)
        os.kill(it.process.pid, signal.SIGTERM)
        for url in it.admin:
            async with asyncio.timeout(5):
                while not await it.draining(url):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert (await it.ask()).json()["error"]["code"] == "server_shutting_down"
        one.speak.set()
        for reader, writer in streams:
            _, _, parts = await read_reply(reader)
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")
            writer.close()


async def test_workers_do_not_outlive_their_supervisor(valkey_url, tmp_path) -> None:
    with contextlib.suppress(AssertionError):
        async with workers(ScriptedReplica("replica-0"), valkey_url, tmp_path) as it:
            children = it.children()
            it.process.kill()
            await it.process.wait()
    await until(lambda: not running(children), within_s=15)


async def test_a_port_that_is_taken_is_told_and_not_shared(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = tmp_path / "gateway.yaml"
        path.write_text(f"store: {{spool: {tmp_path}/spool}}")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "--config", str(path), "--workers", "2"),
            *("--port", str(taken.getsockname()[1])),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 1
    assert b"cannot listen" in err
    assert out == b""


def test_each_worker_has_its_admin_port_and_its_part_of_the_local_share() -> None:
    config = GatewayConfig.model_validate(
        {"admin": {"port": 9000}, "quota": {"local_share": 0.5}, "listen": {"port": 0}}
    )
    parts = [_share(config, 8080, 2, number) for number in range(2)]
    assert [part.admin.port for part in parts] == [9000, 9001]
    assert [part.quota.local_share for part in parts] == [0.25, 0.25]
    assert {part.listen.port for part in parts} == {8080}
