"""A gateway killed under load, again and again: no finished request is missing, none is twice.

Finished is what its client has read to the end. The next gateway on the same spool enters what the
killed one had written down and not yet entered.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
import redis
import yaml
from scripted import BASE, ScriptedReplica, until

from gateway.state.registry import Registry
from gateway.state.tenants import Limits
from gateway.store.redis import Store
from shared.clock import monotonic, wall

KILLS = 10
CLIENTS = 8
LOAD_S = 0.2
LEASE_S = 1.0
CONCURRENCY = 64


class Forks:
    """Gateways, one after the other, on one port and one spool."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = 0

    async def start(self) -> str:
        """Its URL."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self.pid = int((await self._line("pid ")).split()[-1])
        return (await self._line("loraplex gateway ready on ")).split()[-1]

    async def end(self, how: signal.Signals) -> None:
        os.kill(self.pid, how)
        await self._line("ended ")
        self.pid = 0

    async def _line(self, begins: str) -> str:
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = (await self._process.stdout.readline()).decode().strip()
        assert line.startswith(begins), line
        return line


@asynccontextmanager
async def forks(config: dict[str, Any], folder: Path) -> AsyncIterator[Forks]:
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(config))
    script = Path(__file__).parent.parent / "support" / "forked_gateway.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        str(path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    gateways = Forks(process)
    try:
        yield gateways
    finally:
        with suppress(ProcessLookupError):
            if gateways.pid:
                os.kill(gateways.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def client(url: str, key: str, finished: list[str], *, stream: bool) -> None:
    """Asks until the gateway is gone; notes the ids of the replies it has read to the end."""
    body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, verify=False, timeout=5) as http:
        try:
            while True:
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert not stream or answer.text.endswith("data: [DONE]\n\n")
                finished.append(answer.headers["x-request-id"])
        except httpx.TransportError:
            return


async def test_ten_kills_lose_no_finished_request_and_bill_none_twice(
    valkey_url: str, tmp_path: Path
) -> None:
    prefix = f"{uuid.uuid4().hex}:"
    store = Store(valkey_url, prefix=prefix, timeout_s=2)
    await store.start()
    registry = Registry(store)
    await registry.start()
    await registry.create("acme", limits=Limits(concurrency=CONCURRENCY, tokens_per_day=10**9))
    _, key = await registry.key_create("acme")
    one = ScriptedReplica("replica-0", capacity=64)
    await one.start()
    config = {
        "listen": {"port": 0},
        "store": {"url": valkey_url, "prefix": prefix, "timeout_s": 2},
        "quota": {"lease_s": LEASE_S},
        "fleet": {"replicas": [{"id": one.name, "url": one.url}]},
        "log_level": "ERROR",
    }
    config["store"]["spool"] = str(tmp_path / "spool")  # type: ignore[index]
    finished: list[str] = []
    with redis.Redis.from_url(valkey_url, decode_responses=True) as reader:
        async with forks(config, tmp_path) as gateways:
            for _ in range(KILLS):
                url = await gateways.start()
                await ready(url)
                before = len(finished)
                asking = [
                    asyncio.ensure_future(client(url, key, finished, stream=bool(n % 2)))
                    for n in range(CLIENTS)
                ]
                await until(lambda: len(finished) > before)  # noqa: B023
                await asyncio.sleep(LOAD_S)
                await gateways.end(signal.SIGKILL)
                killed_at = monotonic()
                await asyncio.gather(*asking)
                leases = f"{prefix}leases:4:acme:"
                held = reader.zrange(leases, 0, -1, withscores=True)
                now = wall()
                assert all(until_us / 1e6 - now <= LEASE_S for _, until_us in held)
            assert monotonic() - killed_at < 5
            await gateways.start()  # enters what the last one left
            expected = set(finished)
            await until(lambda: expected <= set(records(reader, prefix)), within_s=10)
            await gateways.end(signal.SIGTERM)
        billed = records(reader, prefix)
        assert set(finished) <= set(billed)
        assert max(Counter(billed).values()) == 1
        assert len(finished) > KILLS * CLIENTS
        sums = sum(
            int(count)
            for hour in reader.scan_iter(f"{prefix}usage:*")
            for field, count in reader.hgetall(hour).items()
            if field.startswith("requests ")
        )
        assert sums == len(billed)
    await one.stop()
    await registry.close()
    await store.close()


async def ready(url: str) -> None:
    async with httpx.AsyncClient(verify=False) as http, asyncio.timeout(20):
        while (await http.get(f"{url}/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def records(reader: redis.Redis, prefix: str) -> list[str]:
    """The request ids in the ledger, each as often as it is there."""
    entries: Any = reader.xrange(f"{prefix}records")
    return [orjson.loads(fields["record"])["request"] for _, fields in entries]
