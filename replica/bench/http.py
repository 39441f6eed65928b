"""The work of `workload.py` through HTTP: a replica as a process of its own, and a client in this.

Prompts are sent as token ids and replies are streamed, so a token is one event of the stream. What
is measured is what a client sees: events as they come, each stamped when its bytes were read.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import aiohttp
import yaml

from replica.bench.loops import Measured
from replica.core.sequence import Sequence as Request

_READY: Final = " ready on "
_EVENT: Final = b'data: {"'
_STOP_S: Final = 60


@contextmanager
def serving(folder: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a replica with these settings; its log is `replica.log` in `folder`."""
    config = folder / "replica.yaml"
    config.write_text(yaml.safe_dump(dict(settings)))
    command = [sys.executable, "-m", "replica", "--config", str(config)]
    with (folder / "replica.log").open("wb") as log:
        replica = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert replica.stdout is not None
        line = replica.stdout.readline().decode()
        if _READY not in line:
            last = (folder / "replica.log").read_text()[-2000:]
            raise RuntimeError(f"the replica did not start: {last}")
        yield line.partition(_READY)[2].strip()
    finally:
        replica.terminate()
        try:
            replica.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            replica.kill()
            replica.wait()


def through_http(
    url: str, base_name: str, requests: Sequence[Request], concurrency: int
) -> Measured:
    """A closed loop of so many connections. Steps and the host's time are not seen from here."""
    return asyncio.run(_closed_loop(url, base_name, requests, concurrency))


async def _closed_loop(
    url: str, base_name: str, requests: Sequence[Request], concurrency: int
) -> Measured:
    measured, left = Measured(), list(reversed(requests))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one_after_another() -> None:
            while left:
                await _stream(session, url, base_name, left.pop(), measured)

        began = perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_another())
        measured.wall_s = perf_counter() - began
    return measured


async def _stream(
    session: aiohttp.ClientSession, url: str, base_name: str, request: Request, measured: Measured
) -> None:
    body = {
        "model": request.adapter or base_name,
        "prompt": list(request.prompt),
        "max_tokens": request.sampling.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent, told, text = perf_counter(), 0.0, bytearray()
    left = request.sampling.max_tokens
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:400]}")
        async for blob in response.content.iter_any():
            now, events = perf_counter(), min(blob.count(_EVENT), left)
            text += blob
            left -= events
            if not events:
                continue
            if told:
                measured.gaps += [now - told]
            else:
                measured.first_s[request.id] = now - sent
            measured.gaps += [0.0] * (events - 1)  # they came together
            told = now
    last = next(line for line in reversed(text.split(b"\n")) if line.startswith(_EVENT))
    drawn = json.loads(last.removeprefix(b"data: "))["usage"]["completion_tokens"]
    if drawn != request.sampling.max_tokens:
        raise RuntimeError(f"{drawn} tokens, not {request.sampling.max_tokens}")
    measured.tokens += drawn
