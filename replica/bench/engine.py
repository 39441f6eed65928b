"""`python -m replica.bench.engine`: tokens a second of the whole engine on one GPU.

The work is that of vLLM's figures beside it (`VLLM`): a Llama-3.1-8B shape with random weights,
64 adapters of rank 16 on all seven projections, prompts of 256 random tokens, 128 tokens drawn
greedily whatever they are, a closed loop of C requests in flight and 3 C requests in all (4 at
C = 1). Request i has no adapter, the same as all others, the (i mod 64)-th, or one drawn by
Zipf 1.1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer

from replica.bench.closed_loop import Measured, closed_loop
from replica.bench.random_base import llama, random_adapter, random_base, small
from replica.core.adapter_cache import AdapterCache, Evict, Load
from replica.core.pages import PagePool
from replica.core.scheduler import Scheduler
from replica.core.sequence import Sampling
from replica.core.sequence import Sequence as Request
from replica.engine.cuda.runner import GRAPH_SIZES, CudaRunner
from replica.engine.flight import Arrival
from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.quantised import Quantization
from shared.ids import AdapterId
from shared.messages import Tier

VLLM: Final = {  # 0.25.0, output tokens a second on one H200: concurrency -> mix -> figure
    1: {"none": 204, "one": 128, "distinct": 128, "zipf": 128},
    32: {"none": 4517, "one": 2874, "distinct": 1418, "zipf": 1925},
    64: {"none": 7053, "one": 4114, "distinct": 1641, "zipf": 2581},
    128: {"none": 9525, "one": 5364, "distinct": 2940, "zipf": 3758},
    256: {"none": 10968, "one": 6358, "distinct": 4047, "zipf": 4558},
}
MIXES: Final = ("none", "one", "distinct", "zipf")
_FILES: Final = 8  # different weights; the names beyond share them, in memory of their own
_TOKENS: Final = (1000, 120_000)


@dataclass(frozen=True, slots=True)
class Work:
    concurrency: int
    mix: str
    prompt: int = 256
    output: int = 128
    requests: int = 0  # 0: three times the concurrency

    @property
    def count(self) -> int:
        return self.requests or (3 * self.concurrency if self.concurrency > 1 else 4)


class Bench:
    """One engine, and the work for it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: str,
        dtype: torch.dtype,
        quantization: Quantization,
        ranks: Sequence[int],
        slots: int,
        cache_tokens: int,
        max_running: int,
        max_step_tokens: int,
        page_tokens: int,
        graph_sizes: Sequence[int] = GRAPH_SIZES,
    ) -> None:
        """`ranks` of the adapters there are; `slots` of them may be on the GPU."""
        self.config, self._ranks = config, tuple(ranks)
        on = torch.device(device)
        self._hosts = self._make_adapters(dtype, pinned=on.type == "cuda")
        pages = -(-cache_tokens // page_tokens)
        began = time.perf_counter()
        weights = random_base(config, device=on, dtype=dtype, quantization=quantization)
        self.weights_s = time.perf_counter() - began
        began = time.perf_counter()
        self.runner = CudaRunner(
            weights=weights, slots=slots, max_rank=max(ranks, default=1), pages=pages,
            page_tokens=page_tokens, max_running=max_running, max_step_tokens=max_step_tokens,
            max_model_len=4096, graph_sizes=graph_sizes,
        )  # fmt: skip
        self.graphs_s = time.perf_counter() - began
        self.pool = PagePool(pages=pages, page_tokens=page_tokens)
        self.cache = AdapterCache(slots=max(1, slots), host_max=max(1, len(ranks)), pool=self.pool)
        for host in self._hosts.values():
            wanted = self.runner.pages_of(host)
            self.cache.offer(host.adapter, host.digest, host.rank, host.size_bytes, wanted)
            self.cache.read(host.adapter, host.digest)
        self.scheduler = Scheduler(
            pool=self.pool, cache=self.cache, max_running=max_running,
            max_step_tokens=max_step_tokens, eos_ids=config.eos_token_ids, max_model_len=4096,
        )  # fmt: skip
        self._loading: list[tuple[Arrival | None, tuple[AdapterId, str, int]]] = []
        self._serial = 0

    def _make_adapters(self, dtype: torch.dtype, *, pinned: bool) -> dict[str, HostAdapter]:
        made: dict[tuple[int, int], HostAdapter] = {}
        hosts = {}
        for i, rank in enumerate(self._ranks):
            name, key = f"a{i}", (rank, i % _FILES)
            if key not in made:
                made[key] = random_adapter(
                    name, self.config, rank, dtype=dtype, seed=i, pinned=pinned
                )
            like = made[key]
            hosts[name] = HostAdapter(AdapterId(name), name, rank, like.flat, like.ranks)
        return hosts

    def move_adapters(self) -> None:
        """What the cache wants, as `replica.tiers` does it."""
        for arrival, place in list(self._loading):
            if arrival is None or arrival.query():
                self._loading.remove((arrival, place))
                self.cache.loaded(*place)
        for command in self.cache.poll(0.0):
            if isinstance(command, Load):
                host, slot = self._hosts[command.adapter], command.slot
                arrival = self.runner.load(slot, host, self.cache.pages_in(slot))
                if command.tier is Tier.DISK:
                    self.cache.read(command.adapter, command.digest)
                self._loading.append((arrival, (command.adapter, command.digest, slot)))
            elif isinstance(command, Evict):
                self.runner.clear(command.slot)

    def requests(self, work: Work, seed: int) -> list[Request]:
        sampling = Sampling(max_tokens=work.output, temperature=0.0, ignore_eos=True)
        low, high = min(_TOKENS[0], self.config.vocab_size // 2), _TOKENS[1]
        names = self._names(work)
        made = []
        for i, name in enumerate(names):
            dice = np.random.default_rng(1_000_003 * seed + i)
            ids = dice.integers(low, min(high, self.config.vocab_size), work.prompt).tolist()
            adapter = None if name is None else AdapterId(name)
            self._serial += 1
            made.append(Request(f"q{self._serial}", adapter, tuple(ids), sampling, 0.0))
        return made

    def _names(self, work: Work) -> list[str | None]:
        n, adapters = work.count, len(self._ranks)
        match work.mix:
            case "none":
                return [None] * n
            case "one":
                return ["a0"] * n
            case "distinct":
                return [f"a{i % adapters}" for i in range(n)]
            case "zipf":
                weights = 1.0 / np.arange(1, adapters + 1) ** 1.1
                drawn = np.random.default_rng(7).choice(adapters, size=n, p=weights / weights.sum())
                return [f"a{i}" for i in drawn]
            case _:
                raise ValueError(f"no mix {work.mix!r}: there are {', '.join(MIXES)}")

    def run(self, work: Work, seed: int) -> Measured:
        return closed_loop(
            self.scheduler,
            self.runner,
            self.requests(work, seed),
            work.concurrency,
            between=self.move_adapters,
        )


def cell(work: Work, measured: Measured) -> dict[str, Any]:
    """One line of the table."""
    pure = [s for s, rows, tokens in measured.steps if rows == tokens == work.concurrency]
    same = (work.prompt, work.output) == (256, 128)
    vllm = VLLM.get(work.concurrency, {}).get(work.mix) if same else None
    rate = measured.tokens / measured.wall_s
    return {
        "concurrency": work.concurrency,
        "mix": work.mix,
        "prompt": work.prompt,
        "output": work.output,
        "requests": work.count,
        "output_tokens_per_s": round(rate, 1),
        "vllm_0_25_tokens_per_s": vllm,
        "ratio": None if vllm is None else round(rate / vllm, 2),
        "step_ms_p50": _ms(median(pure)) if pure else None,
        "step_ms_p90": _ms(sorted(pure)[int(0.9 * len(pure))]) if pure else None,
        "steps": len(pure),
        "host_ms_p50": _ms(median(measured.host_s)),
        "first_token_ms_p50": _ms(median(measured.first_s)),
        "first_token_ms_max": _ms(max(measured.first_s)),
        "wall_s": round(measured.wall_s, 3),
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def table(cells: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'in flight':>9} {'mix':>9} {'tokens/s':>9} {'vLLM':>7} {'ratio':>6} {'step ms':>8} "
        f"{'host ms':>8} {'TTFT ms':>8}"
    ]
    for each in cells:
        lines.append(
            f"{each['concurrency']:>9} {each['mix']:>9} {each['output_tokens_per_s']:>9.0f} "
            f"{each['vllm_0_25_tokens_per_s'] or '-':>7} {each['ratio'] or '-':>6} "
            f"{each['step_ms_p50'] or '-':>8} {each['host_ms_p50']:>8} "
            f"{each['first_token_ms_p50']:>8}"
        )
    return "\n".join(lines)


def _machine(device: str) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device == "cpu":
        return versions
    query = "--query-gpu=name,memory.used,clocks.sm,power.draw,driver_version"
    smi = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return versions | {"gpu": smi.stdout.strip()}


def main(
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1,32,64,128,256",
    mixes: Annotated[str, typer.Option(help="Of adapters.")] = ",".join(MIXES),
    quantization: Annotated[Quantization, typer.Option(help="Of the base.")] = Quantization.NONE,
    rank: Annotated[int, typer.Option(help="Of the adapters.")] = 16,
    adapters: Annotated[int, typer.Option(help="How many there are.")] = 64,
    cache_tokens: Annotated[int, typer.Option(help="Tokens the pool holds.")] = 400_000,
    step_tokens: Annotated[int, typer.Option(help="Tokens of one step at most.")] = 8192,
    layers: Annotated[int, typer.Option(help="Of the base; 32 is Llama-3.1-8B.")] = 32,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial of the program.")] = "cuda",
) -> None:
    """Measure the engine, beside vLLM's figures for the same work."""
    cells = [
        Work(int(c), mix) if device != "cpu" else Work(int(c), mix, prompt=8, output=3)
        for c in concurrency.split(",")
        for mix in mixes.split(",")
    ]
    most = max(each.concurrency for each in cells)
    adapted = any(each.mix != "none" for each in cells)
    with torch.inference_mode():
        bench = Bench(
            small() if device == "cpu" else llama(layers),
            device=device,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            quantization=quantization,
            ranks=(rank,) * (adapters if adapted else 0),
            slots=adapters if adapted else 0,
            cache_tokens=cache_tokens,
            max_running=most,
            max_step_tokens=max(step_tokens, most),
            page_tokens=16,
            graph_sizes=[size for size in GRAPH_SIZES if size <= -(-most // 8) * 8],
        )
        results = measure(bench, cells, print)
    print(table(results))
    if out is not None:
        facts = {
            "command": " ".join(["python -m replica.bench.engine", *sys.argv[1:]]),
            "machine": _machine(device),
            "quantization": quantization.value,
            "rank": rank,
            "layers": layers,
            "start_s": {"weights": bench.weights_s, "runner": bench.graphs_s},
        }
        out.write_text(json.dumps({**facts, "cells": results}, indent=1))


def measure(
    bench: Bench, cells: Sequence[Work], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Each cell once, after all of its kinds ran warm."""
    for mix in dict.fromkeys(each.mix for each in cells):
        most = max(each.concurrency for each in cells)
        bench.run(Work(most, mix, cells[0].prompt, 4, requests=most), seed=900)
    results = []
    for seed, work in enumerate(cells, start=1):
        results.append(cell(work, bench.run(work, seed)))
        tell(json.dumps(results[-1]))
    return results


if __name__ == "__main__":
    typer.run(main)
