"""Readings: what replicas say of themselves while a replay runs, from their `/metrics`.

Counters only grow, so the difference of two readings is what happened between them: how many
adapters were loaded into slots and from where, how long steps took and what was computed in them.
"""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields
from typing import Final

import httpx

from shared.clock import monotonic
from shared.tasks import spawn, stop

_LINE: Final = re.compile(r"^([a-z_:]+)(?:\{([^}]*)\})? (\S+)$", re.M)
_OURS: Final = "loraplex_replica_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of one replica; `at_s` from when the watch began, counts and seconds from its start."""

    at_s: float
    replica: str
    running: int
    waiting: int
    steps: float
    step_s: float
    prefill_tokens: float
    decode_tokens: float
    host_loads: float
    host_load_s: float
    disk_loads: float
    disk_load_s: float

    def busy(self, before: Reading) -> float:
        """Share of the time since then that was in steps."""
        gone = self.at_s - before.at_s
        return (self.step_s - before.step_s) / gone if gone else 0.0


def parse(text: str, *, replica: str, at_s: float) -> Reading:
    """Of a scrape; what it does not name is 0."""
    values = {f"{name}{{{labels}}}": float(v) for name, labels, v in _LINE.findall(text)}

    def ours(name: str, labels: str = "") -> float:
        return values.get(f"{_OURS}{name}{{{labels}}}", 0.0)

    def vllm(name: str) -> int:
        return int(next((v for k, v in values.items() if k.startswith(f"vllm:{name}{{")), 0))

    return Reading(
        at_s=at_s,
        replica=replica,
        running=vllm("num_requests_running"),
        waiting=vllm("num_requests_waiting"),
        steps=ours("step_seconds_count"),
        step_s=ours("step_seconds_sum"),
        prefill_tokens=ours("tokens_total", 'kind="prefill"'),
        decode_tokens=ours("tokens_total", 'kind="decode"'),
        host_loads=ours("adapter_load_seconds_count", 'tier="host"'),
        host_load_s=ours("adapter_load_seconds_sum", 'tier="host"'),
        disk_loads=ours("adapter_load_seconds_count", 'tier="disk"'),
        disk_load_s=ours("adapter_load_seconds_sum", 'tier="disk"'),
    )


@asynccontextmanager
async def watching(
    replicas: Mapping[str, str], *, every_s: float = 1.0
) -> AsyncIterator[list[Reading]]:
    """Readings of replicas (name to URL) are added to the list while the body runs.

    At least two of each: the first when the body begins and the last when it has ended.
    """
    began, readings = monotonic(), list[Reading]()
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:

        async def read_all() -> None:
            for name, url in replicas.items():
                text = (await http.get(f"{url}/metrics")).raise_for_status().text
                readings.append(parse(text, replica=name, at_s=monotonic() - began))

        async def go_on() -> None:
            while True:
                await asyncio.sleep(every_s)
                await read_all()

        await read_all()
        watch = spawn(go_on(), name="readings")
        try:
            yield readings
        finally:
            await stop(watch)
        await read_all()


def by_replica(readings: Sequence[Reading]) -> dict[str, list[Reading]]:
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        found.setdefault(reading.replica, []).append(reading)
    return dict(sorted(found.items()))


def as_csv(readings: Sequence[Reading]) -> str:
    out = io.StringIO()
    names = [field.name for field in fields(Reading)]
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(one) for one in readings)
    return out.getvalue()
