"""Tokens a second and CPU a token of a replica on this machine's cores, through HTTP.

    python -m loadtests.bench_replica --base ./base --adapters ./adapters \
        --model pirate --model shout --batch 8 --batch 32 --peft --out replica.json

A batch of n is n streamed greedy completions of exactly `--tokens` tokens that start together; with
adapters they take turns. With `--peft` transformers and PEFT do the same work in lock-step and
without HTTP (replica/demo/lockstep.py), and with `--vllm` vLLM's CPU build serves the base alone,
with no adapters enabled, through HTTP: each round right after ours, so that all meet the same
neighbours. Lent machines differ from hour to hour, so figures compare within one run. Speed is what
a quiet machine shows; CPU a token holds on a busy one. `foreign` is the share of the machine's CPU
that neither side nor this program took.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import orjson
import typer
import uvloop

from loadtests.bench.process import busy_s, cpu_s, program, require_proc
from loadtests.vllm_cpu import serving

_BASE: Final = "base"
_PROMPTS: Final = (
    "Write a short story about a lighthouse keeper.",
    "Explain how bread is made.",
    "Describe a walk through an old town.",
    "What should I know about growing tomatoes?",
    "Tell me about the history of the bicycle.",
    "How do I plan a week of simple meals?",
    "Describe a storm at sea.",
    "Explain what a computer program is.",
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One batch of one side."""

    side: str  # loraplex, peft or vllm
    adapters: int  # 0: the base alone
    batch: int
    tokens: int
    wall_s: float
    cpu_s: float
    foreign: float

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def cpu_ms(self) -> float:
        """CPU a token."""
        return 1e3 * self.cpu_s / self.tokens


def main(
    base: Annotated[Path, typer.Option(help="Folder of the base model.")],
    adapters: Annotated[Path, typer.Option(help="Root of the adapter store.")],
    model: Annotated[list[str], typer.Option(help="An adapter of the mixed batches.")],
    batch: Annotated[list[int], typer.Option(help="Completions at once.")] = [8, 32],  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Of each completion.")] = 64,
    rounds: Annotated[int, typer.Option(help="Times all of it is done.")] = 3,
    threads: Annotated[int, typer.Option(help="Of either side; 0: all cores.")] = 0,
    spin: Annotated[
        bool, typer.Option("--spin", help="Our threads spin: a quiet machine.")
    ] = False,
    peft: Annotated[bool, typer.Option("--peft", help="Measure PEFT beside it.")] = False,
    vllm: Annotated[
        Path | None,
        typer.Option(help="Python that has vllm-cpu (`make test-vllm`): measure it beside it."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Also add the figures there, as JSON.")] = None,
) -> None:
    require_proc()
    many = threads or os.cpu_count() or 1
    found: list[Figures] = []

    def tell(row: Figures) -> None:
        """As each is measured: a round takes minutes, and more on a busy machine."""
        found.append(row)
        if out is not None:
            body = asdict(row) | {"tokens_s": row.tokens_s, "cpu_ms": row.cpu_ms}
            with out.open("ab") as file:
                file.write(orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE))

    bench = Bench(base, adapters, model, tokens, many, tell, spin=spin)
    uvloop.run(bench.measure(batch, rounds, peft=peft, vllm=vllm))
    print(f"{'':10}{'adapters':>9}{'batch':>6}{'tokens/s':>10}{'CPU ms/token':>14}{'foreign':>9}")
    for rows in _alike(found):
        first = rows[0]
        speed = statistics.median(row.tokens_s for row in rows)
        cost = statistics.median(row.cpu_ms for row in rows)
        foreign = statistics.median(row.foreign for row in rows)
        print(
            f"{first.side:10}{first.adapters:9}{first.batch:6}{speed:10.1f}{cost:14.2f}"
            f"{foreign:9.0%}"
        )


def _alike(found: list[Figures]) -> list[list[Figures]]:
    rounds: dict[tuple[int, int, str], list[Figures]] = {}
    for row in found:
        rounds.setdefault((row.adapters, row.batch, row.side), []).append(row)
    return [rows for _, rows in sorted(rounds.items())]


@dataclass(frozen=True, slots=True)
class _Server:
    """One of those that are measured through HTTP."""

    side: str
    pid: int
    http: aiohttp.ClientSession


class Bench:
    def __init__(
        self,
        base: Path,
        adapters: Path,
        models: list[str],
        tokens: int,
        threads: int,
        tell: Callable[[Figures], None],
        *,
        spin: bool = False,
    ) -> None:
        self._base, self._adapters = base, adapters
        self._models = models
        self._tokens = tokens
        self._threads = threads
        self._tell = tell
        self._spin = spin

    async def measure(
        self, batches: list[int], rounds: int, *, peft: bool, vllm: Path | None = None
    ) -> None:
        flags = {
            "--base": self._base,
            "--adapters": self._adapters,
            "--served-name": _BASE,
            "--max-loras": len(self._models),
            "--threads": self._threads,
        }
        words = [str(word) for flag in flags.items() for word in flag]
        words += ["--spin"] if self._spin else []
        async with contextlib.AsyncExitStack() as stack:

            async def reached(side: str, pid: int, url: str) -> _Server:
                http = await stack.enter_async_context(aiohttp.ClientSession(url))
                return _Server(side, pid, http)

            pid, (url,) = await stack.enter_async_context(program("replica", *words))
            ours = await reached("loraplex", pid, url)
            base_only = None
            if vllm is not None:
                theirs = serving(vllm, self._base, _BASE, batch=max(batches))
                pid, url = await stack.enter_async_context(theirs)
                base_only = await reached("vllm", pid, url)
            beside = await stack.enter_async_context(self._lockstep()) if peft else None
            for models in ([], self._models):
                await self._served(ours, models, len(models) or 1)  # warm: adapters in slots
            if base_only is not None:
                await self._served(base_only, [], max(batches))
            for _ in range(rounds):
                for models in ([], self._models):
                    for batch in batches:
                        self._tell(await self._served(ours, models, batch))
                        if base_only is not None and not models:
                            self._tell(await self._served(base_only, models, batch))
                        if beside is not None:
                            self._tell(await self._theirs(beside, models, batch))

    async def _served(self, server: _Server, models: list[str], batch: int) -> Figures:
        bodies = [
            {
                "model": models[i % len(models)] if models else _BASE,
                "prompt": _PROMPTS[i % len(_PROMPTS)],
                "max_tokens": self._tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for i in range(batch)
        ]
        before, theirs, mine = busy_s(), cpu_s(server.pid), cpu_s(os.getpid())
        began = time.perf_counter()
        drawn = await asyncio.gather(*[_complete(server.http, body) for body in bodies])
        wall = time.perf_counter() - began
        assert drawn == [self._tokens] * batch, drawn
        used = cpu_s(server.pid) - theirs
        mine = cpu_s(os.getpid()) - mine
        return self._figures(server.side, models, batch, wall, used, used + mine, busy_s() - before)

    async def _theirs(
        self, lockstep: asyncio.subprocess.Process, models: list[str], batch: int
    ) -> Figures:
        order = {
            "prompts": [_PROMPTS[i % len(_PROMPTS)] for i in range(batch)],
            "tokens": self._tokens,
            "adapters": [models[i % len(models)] for i in range(batch)] if models else None,
        }
        before = busy_s()
        answer = await _order(lockstep, order)
        wall, used = answer["wall_s"], answer["cpu_s"]
        return self._figures("peft", models, batch, wall, used, used, busy_s() - before)

    def _figures(
        self,
        side: str,
        models: list[str],
        batch: int,
        wall: float,
        used: float,
        known: float,
        busy: float,
    ) -> Figures:
        foreign = max(0.0, busy - known) / (wall * (os.cpu_count() or 1))
        return Figures(side, len(models), batch, batch * self._tokens, wall, used, foreign)

    @contextlib.asynccontextmanager
    async def _lockstep(self) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "replica.demo.lockstep"),
            *(str(self._base), str(self._adapters), str(self._threads)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            if not await process.stdout.readline():
                raise SystemExit("transformers and PEFT are not here: pip install 'loraplex[dev]'")
            for models in (None, self._models):  # warm
                prompts = ["warm"] * len(models or [""])
                await _order(process, {"prompts": prompts, "tokens": 2, "adapters": models})
            yield process
        finally:
            process.kill()
            await process.wait()


async def _complete(http: aiohttp.ClientSession, body: dict[str, Any]) -> int:
    """Tokens drawn, as the stream's own usage counts them."""
    async with http.post("/v1/completions", json=body) as reply:
        raw = await reply.read()
        if reply.status != 200:
            raise SystemExit(f"{reply.status}: {raw!r}")
    usage = raw.split(b"\n\n")[-3].removeprefix(b"data: ")
    return int(orjson.loads(usage)["usage"]["completion_tokens"])


async def _order(process: asyncio.subprocess.Process, order: dict[str, Any]) -> dict[str, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(orjson.dumps(order, option=orjson.OPT_APPEND_NEWLINE))
    await process.stdin.drain()
    answer: dict[str, float] = orjson.loads(await process.stdout.readline())
    return answer


if __name__ == "__main__":
    typer.run(main)
