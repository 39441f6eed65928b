"""A small real fleet of processes: store, replicas of a tiny base on the CPU, one gateway.

All addresses are known from the start, so that a replica of the gateway's list can be started
later: that is how one joins.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx
import yaml

from gateway.store.embedded import embedded
from loadtests.bench.process import free_port
from loadtests.weights import Size, make

ADMIN_KEY: Final = "live-admin-key-0123456789"
BASE: Final = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the fleet has of everything."""

    replicas: int = 3
    later: int = 0  # replicas in the gateway's list that are not started at first
    adapters: int = 32
    slots: int = 4
    host: int = 24
    capacity: int = 4
    placement: bool = True


@dataclass(slots=True)
class LiveFleet:
    """`async with LiveFleet(folder, shape) as fleet`."""

    folder: Path
    shape: Shape
    url: str = ""
    key: str = ""
    urls: dict[str, str] = field(default_factory=dict)  # of the replicas
    _held: ExitStack = field(default_factory=ExitStack)
    _running: dict[str, Process] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Of the adapters, as a trace of so many names them."""
        width = len(str(self.shape.adapters - 1))
        return [f"adapter-{n:0{width}d}" for n in range(self.shape.adapters)]

    async def __aenter__(self) -> Self:
        shape, folder = self.shape, self.folder
        store = self._held.enter_context(embedded(folder / "store"))
        await make(folder / BASE, folder / "adapters", self.names, Size())
        for n in range(shape.replicas + shape.later):
            self.urls[f"replica-{n}"] = f"http://127.0.0.1:{free_port()}"
        await asyncio.gather(*(self.start(f"replica-{n}") for n in range(shape.replicas)))
        config = folder / "gateway.yaml"
        config.write_text(yaml.safe_dump(self._config(store)))
        self.url = await self._spawn("gateway", ["gateway", "--config", str(config)])
        self.key = await self.tenant("t")
        return self

    async def __aexit__(self, *error: object) -> None:
        for process in self._running.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            try:
                await asyncio.wait_for(process.wait(), 20)
            except TimeoutError:
                process.kill()
        self._held.close()

    async def start(self, name: str) -> None:
        """Return when it serves."""
        shape, port = self.shape, self.urls[name].rpartition(":")[2]
        options = {
            "base": self.folder / BASE,
            "adapters": self.folder / "adapters",
            "name": name,
            "port": port,
            "max-loras": shape.slots,
            "max-cpu-loras": shape.host,
            "threads": 1,
        }
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        await self._spawn(name, ["replica", *words])

    def kill(self, name: str) -> None:
        self._running[name].send_signal(signal.SIGKILL)

    async def states(self) -> dict[str, dict[str, Any]]:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
            rows = (await http.get(f"{self.url}/admin/v1/replicas")).json()["data"]
        return {row["replica"]: row for row in rows}

    async def resident(self) -> dict[str, dict[str, str]]:
        """Replica -> adapter -> tier."""
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
            rows = (await http.get(f"{self.url}/admin/v1/residency")).json()["data"]
        return {r["replica"]: {s["adapter"]: s["tier"] for s in r["adapters"]} for r in rows}

    async def drain(self, name: str) -> None:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
            (await http.post(f"{self.url}/admin/v1/replicas/{name}/drain")).raise_for_status()

    async def loads(self, name: str) -> int:
        """Loads into slots so far, from host memory or disk."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{self.urls[name]}/metrics")).text
        found = re.findall(
            r"^loraplex_replica_adapter_load_seconds_count\{[^}]*\} ([\d.]+)", text, re.M
        )
        return sum(int(float(count)) for count in found)

    def _config(self, store: str) -> dict[str, Any]:
        entries = [{"id": name, "url": url} for name, url in self.urls.items()]
        return {
            "listen": {"port": 0},
            "admin": {"key": ADMIN_KEY},
            "store": {"url": store, "spool": str(self.folder / "spool")},
            "fleet": {"replicas": entries},
            "placement": {"enabled": self.shape.placement, "interval_s": 0.5},
            "router": {"load_floor": self.shape.capacity},
            "health": {"slow_start_s": 2},
            "log_level": "WARNING",
        }

    async def _spawn(self, name: str, words: list[str]) -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name != "gateway":
            env["LORAPLEX_MAX_RUNNING"] = str(self.shape.capacity)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *words, stdout=PIPE, env=env
        )
        assert process.stdout is not None
        ready = (await process.stdout.readline()).decode()
        if " ready on " not in ready:
            raise RuntimeError(f"{name} did not start; what it said is above")
        self._running[name] = process
        return ready.split()[-1]

    async def tenant(self, name: str) -> str:
        """A new one: its key."""
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
            await http.post(f"{self.url}/admin/v1/tenants", json={"id": name})
            made = await http.post(f"{self.url}/admin/v1/tenants/{name}/keys", json={})
            return str(made.raise_for_status().json()["secret"])
