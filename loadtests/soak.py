"""Hundreds of paced streams through one gateway for minutes: `python -m loadtests.soak`.

What it shows: that memory does not grow with time, that no stream is cut or loses an event, and
how late events come through. It starts everything itself: a store, two paced servers
(loadtests/paced_server.py) and a gateway, each a process; the clients are here. Streams are kept at
the wanted number for the time given (one ends, another begins), then the last ones run out.

Memory is the gateway's resident set each second. Its slope is a least-squares line over the
second half of the steady time: the first half fills caches and pools. Lateness is from the
server's write to the client's read, so it has both hops, all queues and this program's own share.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import orjson
import typer
import uvloop
import yaml

from gateway.store.embedded import embedded
from loadtests.paced_client import Seen, stream
from shared import tasks

_SERVERS: Final = 2
_TENANTS: Final = 5
_ADMIN_KEY: Final = "soak-admin-key-0123456789"
_PERCENTILES: Final = (50, 90, 99, 99.9)
_LAST_S: Final = 90.0  # the longest reply, and some


@dataclass(frozen=True)
class Plan:
    streams: int
    seconds: float
    shortest_s: float
    longest_s: float
    seed: int


async def soak(plan: Plan) -> dict[str, Any]:
    """Run it; the figures, for a table or a file."""
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        store = held.enter_context(embedded(folder / "store"))
        async with contextlib.AsyncExitStack() as stack:
            urls = []
            for n in range(_SERVERS):
                command = ["loadtests.paced_server", "--seed", str(plan.seed + n)]
                url, _ = await stack.enter_async_context(_process(command))
                urls.append(url)
            config = folder / "gateway.yaml"
            config.write_text(yaml.safe_dump(_config(plan, store, urls, folder)))
            command = ["gateway", "--config", str(config)]
            url, pid = await stack.enter_async_context(_process(command))
            keys = await _keys(url)
            seen, rss = Seen(), [_rss_mib(pid)]
            sampling = tasks.spawn(_sample(pid, rss), name="memory")
            loop = asyncio.get_running_loop()
            began, cpu = loop.time(), _cpu_s(pid)
            await _keep_running(plan, url, keys, seen)
            steady_s, steady = loop.time() - began, len(rss)
            cpu_s = _cpu_s(pid) - cpu
            await _run_out(loop.time() + _LAST_S)
            await tasks.stop(sampling)
            metrics = await _outcomes(url)
    return _figures(plan, seen, rss[:steady], cpu_s / steady_s, metrics)


async def _keep_running(plan: Plan, url: str, keys: list[str], seen: Seen) -> None:
    """The wanted number at any time; begun over the first fifth, so that not all end at once."""
    dice = random.Random(plan.seed)
    loop = asyncio.get_running_loop()
    until = loop.time() + plan.seconds

    async def one_place(number: int) -> None:
        await asyncio.sleep(plan.seconds / 5 * number / plan.streams)
        while loop.time() < until:
            seconds = dice.uniform(plan.shortest_s, plan.longest_s)
            await stream(url, keys[number % len(keys)], seconds, seen)

    for number in range(plan.streams):
        _places.add(place := tasks.spawn(one_place(number), name=f"place {number}"))
        place.add_done_callback(_places.discard)
    await asyncio.sleep(plan.seconds)


_places: set[asyncio.Task[None]] = set()


async def _run_out(until: float) -> None:
    """Streams that run finish; none begins."""
    if _places:
        loop = asyncio.get_running_loop()
        _, late = await asyncio.wait(list(_places), timeout=max(0.0, until - loop.time()))
        await tasks.stop(*late)


def _config(plan: Plan, store: str, urls: list[str], folder: Path) -> dict[str, Any]:
    return {
        "listen": {"port": 0},
        "admin": {"key": _ADMIN_KEY},
        "store": {"url": store, "spool": str(folder / "ledger.spool")},
        "log_level": "WARNING",
        "fleet": {
            "replicas": [
                {
                    "id": f"paced-{n}",
                    "url": url,
                    "kind": "openai",
                    "capacity": -(-plan.streams // _SERVERS) + 8,
                }
                for n, url in enumerate(urls)
            ]
        },
    }


@contextlib.asynccontextmanager
async def _process(arguments: list[str]) -> AsyncIterator[tuple[str, int]]:
    """`python -m ARGUMENTS` until the block ends: the URL of its ready line, and its pid."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        if " ready on " not in line:
            raise RuntimeError(f"{arguments[0]} did not start; it says why above")
        yield line.split()[-1], process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _keys(url: str) -> list[str]:
    """Tenants made over the admin API, a key each, once the gateway is ready."""
    headers = {"authorization": f"Bearer {_ADMIN_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, verify=False, timeout=20) as http:
        while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        keys = []
        for n in range(_TENANTS):
            limits = {"tokens_per_min": 10**9}  # so that quotas are at work, and never in the way
            tenant = {"id": f"tenant-{n}", "limits": limits}
            (await http.post("/admin/v1/tenants", json=tenant)).raise_for_status()
            made = await http.post(f"/admin/v1/tenants/tenant-{n}/keys")
            keys.append(str(made.raise_for_status().json()["secret"]))
    return keys


async def _outcomes(url: str) -> dict[str, float]:
    """How the gateway itself says that requests ended."""
    async with httpx.AsyncClient(verify=False, timeout=20) as http:
        text = (await http.get(f"{url}/metrics")).text
    found: dict[str, float] = {}
    for outcome, count in re.findall(r'requests_total{.*outcome="(\w+)".*} (\S+)', text):
        found[outcome] = found.get(outcome, 0) + float(count)
    return found


async def _sample(pid: int, rss: list[float]) -> None:
    while True:
        await asyncio.sleep(1)
        rss.append(_rss_mib(pid))


def _rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _figures(
    plan: Plan, seen: Seen, rss: Sequence[float], cpu: float, outcomes: dict[str, float]
) -> dict[str, Any]:
    late = sorted(seen.late_ms)
    half = rss[len(rss) // 2 :]
    return {
        "plan": asdict(plan),
        "cores": os.cpu_count(),
        "streams_finished": seen.finished,
        "streams_cut": seen.cut,
        "streams_refused": seen.refused,
        "events": seen.events,
        "events_lost": seen.lost_events,
        "late_ms": {f"p{p:g}": round(_at(late, p), 2) for p in _PERCENTILES}
        | {"max": round(late[-1], 2) if late else 0.0},
        "gateway_cpu": round(cpu, 3),
        "gateway_outcomes": outcomes,
        "rss_mib": {
            "first": round(rss[0], 1),
            "middle": round(half[0], 1),
            "last": round(rss[-1], 1),
            "most": round(max(rss), 1),
            "slope_mib_per_min": round(_slope(half) * 60, 3),
        },
    }


def _at(ordered: Sequence[float], percent: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def _slope(values: Sequence[float]) -> float:
    """Of the least-squares line, per sample."""
    n = len(values)
    if n < 2:
        return 0.0
    middle, mean = (n - 1) / 2, sum(values) / n
    above = sum((x - middle) * (y - mean) for x, y in enumerate(values))
    return above / sum((x - middle) ** 2 for x in range(n))


def passed(figures: dict[str, Any]) -> bool:
    """No stream cut or refused, no event lost."""
    bad = ("streams_cut", "streams_refused", "events_lost")
    return figures["streams_finished"] > 0 and not any(figures[name] for name in bad)


def table(figures: dict[str, Any]) -> str:
    rss, late = figures["rss_mib"], figures["late_ms"]
    rows = [
        ("streams at a time", figures["plan"]["streams"]),
        ("streams finished", figures["streams_finished"]),
        ("streams cut, refused", f"{figures['streams_cut']}, {figures['streams_refused']}"),
        ("events, lost", f"{figures['events']}, {figures['events_lost']}"),
        ("late, ms", "  ".join(f"{name} {value:g}" for name, value in late.items())),
        ("gateway CPU, cores", figures["gateway_cpu"]),
        ("gateway memory, MiB", f"{rss['first']} -> {rss['last']}, most {rss['most']}"),
        ("its slope, MiB a minute", rss["slope_mib_per_min"]),
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)


def main(
    streams: Annotated[int, typer.Option(min=1, help="At a time.")] = 500,
    seconds: Annotated[float, typer.Option(min=1, help="Streams begin for so long.")] = 120,
    shortest_s: Annotated[float, typer.Option(help="Of a reply.")] = 20,
    longest_s: Annotated[float, typer.Option(help="Of a reply.")] = 60,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
) -> None:
    """Paced streams through one gateway; exit status 1 when one was cut."""
    figures = uvloop.run(soak(Plan(streams, seconds, shortest_s, longest_s, seed)))
    print(table(figures))
    if json is not None:
        command = " ".join(["python -m loadtests.soak", *sys.argv[1:]])
        text = orjson.dumps({"command": command, **figures}, option=orjson.OPT_INDENT_2)
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_bytes(text + b"\n")
    if not passed(figures):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
