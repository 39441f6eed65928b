"""Replay a trace against a gateway, open loop, from one asyncio process: for headline figures.

    python -m loadtests.replay --url http://127.0.0.1:8080 --trace trace.jsonl --keys keys.json \\
        --outcomes run.jsonl

The same work as `locustfile`, which is for people who know Locust and want its shapes and its web
page, at a fraction of the generator's processor time. The rules are the same: every request leaves
when the trace says, latency counts from then, and a run whose generator fell behind fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
import uvloop

from loadtests import outcome as outcomes
from loadtests import trace as traces
from loadtests.outcome import Outcome
from loadtests.report import figures
from loadtests.request import keys_of, request_body
from loadtests.trace import Arrival, Trace
from loadtests.usage import or_usage, show
from shared.clock import monotonic
from shared.tasks import spawn

_LINE_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    url: str
    base: str = "base"  # model of arrivals that name no adapter
    keys: Mapping[str, str]  # by tenant
    speed: float = 1.0  # times of the trace are divided by it
    timeout_s: float = 600.0


async def replay(trace: Trace, target: Target) -> tuple[Outcome, ...]:
    """One outcome an arrival, in order."""
    if not trace:
        return ()
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    async with aiohttp.ClientSession(
        target.url, connector=connector, timeout=timeout, read_bufsize=_LINE_MAX
    ) as session:
        begin = monotonic() + 0.1
        sent = []
        for number, arrival in enumerate(trace):
            after = (arrival.at_s - trace[0].at_s) / target.speed
            await asyncio.sleep(max(begin + after - monotonic(), 0))
            row = Outcome(number, after, arrival.tenant, arrival.adapter or target.base)
            sent.append(spawn(_send(session, target, arrival, row, begin + after), name="replay"))
        return tuple(await asyncio.gather(*sent))


async def _send(
    session: aiohttp.ClientSession, target: Target, arrival: Arrival, row: Outcome, due: float
) -> Outcome:
    row.late_s = monotonic() - due
    headers = {
        "Authorization": f"Bearer {target.keys[arrival.tenant]}",
        "Accept-Encoding": "identity",  # a compressed stream would come in lumps
    }
    try:
        body = request_body(row, arrival)
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            row.status = response.status
            row.take_headers(response.headers)
            if response.status == 200:
                await _follow(response, row, due)
            else:
                row.failure = f"HTTP {response.status}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        row.failure = f"{'the stream broke' if row.status else 'no answer'}: {error!r}"
    row.total_s = monotonic() - due
    return row


async def _follow(response: aiohttp.ClientResponse, row: Outcome, due: float) -> None:
    row.failure = "the stream ended without [DONE]"
    while event := await response.content.readuntil(b"\n\n"):
        if row.take_event(event, monotonic() - due):
            return


def main(
    url: Annotated[str, typer.Option(help="Of the gateway.")],
    trace: Annotated[Path, typer.Option(help="JSON lines of arrivals (loraplex trace).")],
    keys: Annotated[Path | None, typer.Option(help='JSON {"tenant": "API key"}.')] = None,
    base: Annotated[str, typer.Option(help="Model of arrivals without adapter.")] = "base",
    speed: Annotated[float, typer.Option(min=0.001, help="2 replays twice as fast.")] = 1.0,
    late_p99_ms: Annotated[float, typer.Option(help="More lateness fails the run.")] = 50.0,
    out: Annotated[Path | None, typer.Option("--outcomes", help="Write them here.")] = None,
) -> None:
    """Replay a trace, open loop; exit code 1 when a request failed or the generator fell behind."""
    rows = or_usage(lambda: traces.read(trace))
    known = or_usage(lambda: keys_of(keys, {str(row.tenant) for row in rows}))
    target = Target(url=url, base=base, keys=known, speed=speed)
    done = uvloop.run(replay(rows, target))
    if out is not None:
        outcomes.write(done, out)
    told = figures(done)
    show(told, json=False)
    late_ms = told["late_ms"]["p99"]
    if late_ms > late_p99_ms:
        typer.echo(f"fell behind: p99 lateness {late_ms:.1f} ms > {late_p99_ms} ms", err=True)
    raise typer.Exit(int(late_ms > late_p99_ms or told["failed"] > 0))


if __name__ == "__main__":
    typer.run(main)
