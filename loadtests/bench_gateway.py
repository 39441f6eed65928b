"""What a request and a chunk cost in the gateway, beside a bare splice: `make bench-gateway`.

    python -m loadtests.bench_gateway --seconds 3 --out gateway.json

Everything is started here: four fake servers, the gateway with all features and its own store
(loadtests/bench/server.py), and a proxy that only passes bytes (loadtests/bench/splice.py). The
same load meets both in turn; what counts is CPU, not speed, so that it holds on a busy machine:
the run time of all threads of the process and its children (the store is one), as Linux keeps it,
divided by the replies, or the events, that came through. Compare within one run only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import orjson
import typer
import uvloop

from loadtests.bench.load import Kind, requests, run
from loadtests.bench.process import cpu_s, program, require_proc
from loadtests.bench.server import KEY

_SERVERS: Final = 4
_WARM_S: Final = 0.5
_WORK: Final[dict[str, tuple[Kind, int, str]]] = {
    "json": ("json", 32, "replies"),
    "sse": ("sse", 32, "replies"),
    "paced50": ("paced", 50, "events"),
    "paced200": ("paced", 200, "events"),
}
"""By name: what is asked for, on how many connections, and what one of it is."""


def main(
    seconds: Annotated[float, typer.Option(help="Of each load on each proxy.")] = 3.0,
    out: Annotated[Path | None, typer.Option(help="Also write the figures there, as JSON.")] = None,
) -> None:
    require_proc()
    figures = uvloop.run(measure(seconds))
    print(f"{'CPU, µs':12}{'splice':>10}{'gateway':>10}{'ratio':>8}")
    for name, (_, _, unit) in _WORK.items():
        bare, ours = figures["splice"][name]["cpu_us"], figures["gateway"][name]["cpu_us"]
        one = {"replies": "request", "events": "chunk"}[unit]
        print(f"{name:12}{bare:10.1f}{ours:10.1f}{ours / bare:8.2f}   a {one}")
    if out is not None:
        out.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")


async def measure(seconds: float) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    async with program("loadtests.bench.replica", *["0"] * _SERVERS) as (_, servers):
        flags = [word for url in servers for word in ("--replica", url)]
        proxies = {
            "splice": ("loadtests.bench.splice", *servers),
            "gateway": ("loadtests.bench.server", *flags),
        }
        for name, words in proxies.items():
            async with program(*words) as (pid, (url,)):
                figures[name] = {work: await _one(work, pid, url, seconds) for work in _WORK}
    return figures


async def _one(work: str, pid: int, url: str, seconds: float) -> dict[str, Any]:
    kind, connections, unit = _WORK[work]
    parts = urlsplit(url)
    address, wires = (parts.hostname or "", parts.port or 80), requests(kind, KEY)
    await run(address, wires, connections=connections, seconds=_WARM_S)
    before = cpu_s(pid)
    count = await run(address, wires, connections=connections, seconds=seconds)
    used_s = cpu_s(pid) - before
    many = getattr(count, unit)
    if count.failed or not many:
        raise SystemExit(f"{work}: {count.failed} failed, {many} {unit}: {count.seen}")
    return {"cpu_us": round(used_s / many * 1e6, 1), unit: many, "connections": connections}


if __name__ == "__main__":
    typer.run(main)
