"""A fleet as a person starts it: `loraplex up` with replicas, store and gateway, and its tenants.

    async with UpFleet(folder, shape, names) as fleet:
        keys = await fleet.register(tenants, limits)

Everything is below `folder`, on free ports. What the shape says of slots, memory and places goes to
the replicas by their environment, since `up` has no options for it. The end is Ctrl-C's: it drains,
and what does not end in time is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import httpx
import yaml

from loadtests.weights import Size, make
from shared.clock import monotonic

BASE: Final = "small"
_UP: Final = "from gateway.cli import main; main()"
_READY_S: Final = 300.0
_END_S: Final = 60.0
_SETTLED_S: Final = 3.0  # nothing has moved for so long


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the fleet has of everything."""

    replicas: int = 2
    slots: int = 8
    host: int = 24
    capacity: int = 16
    pages: int = 4096
    step_tokens_max: int = 512
    base: Path | None = None  # None: a small random one...
    adapters: Path | None = None  # ...and adapters that fit it, under the names asked for
    size: Size = field(default_factory=lambda: Size(layers=6, hidden=256, context=2048))

    def environment(self) -> dict[str, str]:
        told = {
            "MAX_LORAS": self.slots,
            "MAX_CPU_LORAS": max(self.host, self.slots),
            "MAX_RUNNING": self.capacity,
            "PAGES": self.pages,
            "MAX_STEP_TOKENS": self.step_tokens_max,
        }
        return {f"LORAPLEX_{name}": str(value) for name, value in told.items()}


@dataclass(slots=True)
class UpFleet:
    folder: Path
    shape: Shape
    names: Sequence[str]  # of the adapters
    config: Mapping[str, Any] = field(default_factory=dict)  # of the gateway
    url: str = ""
    base: str = ""
    replicas: dict[str, str] = field(default_factory=dict)  # name to URL
    _process: Process | None = None
    _admin_key: str = ""

    async def __aenter__(self) -> Self:
        base = self.shape.base or self.folder / BASE
        adapters = self.shape.adapters or self.folder / "adapters"
        if self.shape.base is None:
            await make(base, adapters, self.names, self.shape.size)
        try:
            await self._start(base, adapters)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def register(
        self, tenants: Iterable[str], limits: Mapping[str, int] | None = None
    ) -> dict[str, str]:
        """Tenant to key; each has the same limits, or none."""
        keys = {}
        async with self._admin() as http:
            for tenant in tenants:
                told = {"id": tenant, "limits": dict(limits or {})}
                (await http.post("tenants", json=told)).raise_for_status()
                made = await http.post(f"tenants/{tenant}/keys", json={})
                keys[tenant] = str(made.raise_for_status().json()["secret"])
        return keys

    async def settled(self, within_s: float = 60.0) -> None:
        """Until no adapter moves any more, or the time is over."""
        last: Any = None
        began = since = monotonic()
        async with self._admin() as http:
            while monotonic() - began < within_s:
                rows = (await http.get("residency")).raise_for_status().json()["data"]
                now = [[(one["adapter"], one["tier"]) for one in row["adapters"]] for row in rows]
                if now != last:
                    last, since = now, monotonic()
                elif monotonic() - since > _SETTLED_S:
                    return
                await asyncio.sleep(0.3)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGINT)
        try:
            await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            process.kill()  # the kernel tells what it has started
            await process.wait()

    def log(self) -> str:
        """What `up` said."""
        return (self.folder / "up.log").read_text()

    async def _start(self, base: Path, adapters: Path) -> None:
        config, data = self.folder / "given.yaml", self.folder / "data"
        config.write_text(yaml.safe_dump({"log_level": "WARNING", **self.config}))
        words = ["up", "--port", "0", "--replicas", str(self.shape.replicas)]
        words += ["--data-dir", str(data), "--config", str(config)]
        words += ["--base", str(base), "--adapters", str(adapters)]
        environment = {**os.environ, **self.shape.environment()}
        with (self.folder / "up.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _UP, *words, stdout=PIPE, stderr=log, env=environment
            )
        assert self._process.stdout is not None
        ready = await asyncio.wait_for(self._process.stdout.readline(), _READY_S)
        if b"ready on" not in ready:
            raise RuntimeError(f"loraplex up did not start:\n{self.log()}")
        self.url, self.base = ready.decode().split()[-1], base.name
        told = yaml.safe_load((data / "run" / "gateway.yaml").read_text())
        self.replicas = {one["id"]: one["url"] for one in told["fleet"]["replicas"]}
        self._admin_key = json.loads((data / "keys.json").read_text())["admin"]

    def _admin(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=f"{self.url}/admin/v1/",
            headers={"Authorization": f"Bearer {self._admin_key}"},
            timeout=30,
            trust_env=False,
        )
