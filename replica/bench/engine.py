"""`python -m replica.bench.engine`: tokens a second of the whole engine on one GPU.

The work is that of vLLM's figures beside it (`VLLM`): a Llama-3.1-8B shape with random weights,
64 adapters of rank 16 on all seven projections, prompts of 256 random tokens, 128 tokens drawn
greedily whatever they are, a closed loop of C requests in flight and 3 C requests in all (4 at
C = 1). `workload.py` says which adapter a request has.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import torch
import typer

from replica.bench.folders import write_adapters, write_base, write_tokenizer
from replica.bench.http import serving, through_http
from replica.bench.loops import Measured
from replica.bench.random_base import llama, random_base, small
from replica.bench.rig import MODEL_LEN, Rig
from replica.bench.workload import MIXES, Work
from replica.engine.model_config import ModelConfig
from replica.engine.quantised import Quantization

VLLM: Final = {  # 0.25.0, output tokens a second on one H200: concurrency -> mix -> figure
    1: {"none": 204, "one": 128, "distinct": 128, "zipf": 128},
    32: {"none": 4517, "one": 2874, "distinct": 1418, "zipf": 1925},
    64: {"none": 7053, "one": 4114, "distinct": 1641, "zipf": 2581},
    128: {"none": 9525, "one": 5364, "distinct": 2940, "zipf": 3758},
    256: {"none": 10968, "one": 6358, "distinct": 4047, "zipf": 4558},
}


def cell(work: Work, measured: Measured) -> dict[str, Any]:
    """One line of the table."""
    pure = [s for s, rows, tokens in measured.steps if rows == tokens == work.concurrency]
    same = (work.prompt, work.output) == (256, 128)
    vllm = VLLM.get(work.concurrency, {}).get(work.mix) if same else None
    rate, first_s = measured.tokens / measured.wall_s, list(measured.first_s.values())
    return {
        "concurrency": work.concurrency,
        "mix": work.mix,
        "prompt": work.prompt,
        "output": work.output,
        "requests": work.count,
        "output_tokens_per_s": round(rate, 1),
        "vllm_0_25_tokens_per_s": vllm,
        "ratio": None if vllm is None else round(rate / vllm, 2),
        "step_ms_p50": milliseconds(median(pure)) if pure else None,
        "step_ms_p90": milliseconds(quantile(pure, 0.9)) if pure else None,
        "steps": len(pure),
        "host_ms_p50": milliseconds(median(measured.host_s)) if measured.host_s else None,
        "first_token_ms_p50": milliseconds(median(first_s)),
        "first_token_ms_max": milliseconds(max(first_s)),
        "token_gap_ms_p50": milliseconds(quantile(measured.gaps, 0.5)),
        "token_gap_ms_p99": milliseconds(quantile(measured.gaps, 0.99)),
        "wall_s": round(measured.wall_s, 3),
    }


def milliseconds(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def table(cells: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'in flight':>9} {'mix':>9} {'tokens/s':>9} {'vLLM':>7} {'ratio':>6} {'step ms':>8} "
        f"{'host ms':>8} {'TTFT ms':>8}"
    ]
    for each in cells:
        lines.append(
            f"{each['concurrency']:>9} {each['mix']:>9} {each['output_tokens_per_s']:>9.0f} "
            f"{each['vllm_0_25_tokens_per_s'] or '-':>7} {each['ratio'] or '-':>6} "
            f"{each['step_ms_p50'] or '-':>8} {each['host_ms_p50'] or '-':>8} "
            f"{each['first_token_ms_p50']:>8}"
        )
    return "\n".join(lines)


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if device == "cpu":
        return versions
    query = "--query-gpu=name,memory.used,clocks.sm,power.draw,driver_version"
    smi = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return versions | {"gpu": smi.stdout.strip()}


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: loraplex bench engine --concurrency 32,64 --mixes none,distinct")
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
    http: Annotated[bool, typer.Option("--http", help="Through a replica's own HTTP.")] = False,
) -> None:
    """Measure the engine, beside vLLM's figures for the same work."""
    trial = device == "cpu"
    cells = [
        Work(int(c), mix, prompt=8, output=3) if trial else Work(int(c), mix)
        for c in concurrency.split(",")
        for mix in mixes.split(",")
    ]
    most = max(each.concurrency for each in cells)
    there_are = adapters if any(each.mix != "none" for each in cells) else 0
    config = small() if trial else llama(layers)
    facts: dict[str, Any] = {
        "command": " ".join(["python -m replica.bench.engine", *sys.argv[1:]]),
        "quantization": quantization.value,
        "rank": rank,
        "layers": layers,
    }
    if http:
        limits = {"max_running": most, "max_step_tokens": max(step_tokens, most)}
        settings = limits | {"device": device, "quantization": quantization.value}
        pages = -(-cache_tokens // 16)
        results = served(cells, config, settings | {"pages": pages}, rank, there_are, print)
    else:
        rig = Rig(
            config,
            device=device,
            quantization=quantization,
            ranks=(rank,) * there_are,
            slots=there_are,
            cache_tokens=cache_tokens,
            max_running=most,
            max_step_tokens=max(step_tokens, most),
        )
        facts["start_s"] = {"weights": rig.weights_s, "runner": rig.runner_s}
        results = measure(rig, cells, print)
    print(table(results))
    if out is not None:
        facts["machine"] = machine(device)
        out.write_text(json.dumps({**facts, "cells": results}, indent=1))


def measure(rig: Rig, cells: Sequence[Work], tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Each cell once, after all of its kinds ran warm."""
    most = max(each.concurrency for each in cells)
    for mix in dict.fromkeys(each.mix for each in cells):
        rig.run(Work(most, mix, cells[0].prompt, 4, requests=most), seed=900)
    return _each(cells, rig.run, tell)


def served(
    cells: Sequence[Work],
    config: ModelConfig,
    settings: dict[str, Any],
    rank: int,
    adapters: int,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The same by a replica that is a process of its own, with a base and adapters on a disk."""
    device = settings["device"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("base", "adapters"):
            (folder / each).mkdir()
        weights = random_base(config, device=torch.device(device), dtype=torch.bfloat16)
        write_base(folder / "base", weights)
        del weights
        write_tokenizer(folder / "base", config.vocab_size)
        write_adapters(folder / "adapters", config, rank=rank, count=adapters, files=8)
        settings = settings | {
            "base": str(folder / "base"),
            "adapters": str(folder / "adapters"),
            "served_name": "base",
            "dtype": "float32" if device == "cpu" else "bfloat16",
            "max_loras": max(1, adapters),
            "max_lora_rank": rank,
            "max_waiting": 4096,
            "max_model_len": min(MODEL_LEN, 8 * settings["pages"]),  # half the pool at most
            "host_bytes": 16 << 30,
        }
        with serving(folder, settings) as url:

            def run(work: Work, seed: int) -> Measured:
                requests = work.requests_for(config, adapters, seed)
                return through_http(url, "base", requests, work.concurrency)

            every = Work(adapters, "distinct", cells[0].prompt, 4, requests=adapters)
            for seed in (900, 901):  # adapters come into slots, then prompts are computed beside
                if adapters:
                    run(every, seed)
            return _each(cells, run, tell)


def _each(
    cells: Sequence[Work], run: Callable[[Work, int], Measured], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    results = []
    for seed, work in enumerate(cells, start=1):
        results.append(cell(work, run(work, seed)))
        tell(json.dumps(results[-1]))
    return results


if __name__ == "__main__":
    app(prog_name="loraplex bench engine")
