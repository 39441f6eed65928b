"""`python -m replica.bench.agreement`: do the fused kernels compute what the reference computes?

A base of Llama-3.1-8B's widths and few layers is written to a folder and read twice: by the
reference engine, in float32 on the CPU, and by the CUDA engine in bfloat16. Six sequences, some
with adapters of ranks 8, 16 and 64, are prefilled in chunks and then decoded, all in one batch,
each fed the reference's likeliest token; and once more one by one. Told is every row's error of the
logits, ||ours - theirs|| / ||theirs||, and whether both find the same token likeliest.

The tolerance is that of the dtype: bfloat16 keeps 8 bits, each layer rounds its stream about six
times, and errors of independent roundings grow as the root of their number.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from torch import Tensor

from replica.bench.engine import machine
from replica.bench.folders import write_base
from replica.bench.random_base import llama, random_adapter, random_base
from replica.core.sequence import Sampling
from replica.core.step import BASE_SLOT, Row, Step
from replica.engine.cuda.runner import CudaRunner
from replica.engine.flight import StepRunner
from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.quantised import Quantization
from replica.engine.runner import Runner
from replica.engine.weights import BaseWeights, load_base

_PAGE_TOKENS: Final = 64
_PAGES: Final = 400
_GREEDY: Final = Sampling(max_tokens=64, temperature=0.0)
_SEQUENCES: Final = ((5, None), (64, 0), (200, 1), (257, 2), (33, 0), (129, None))
_RANKS: Final = (16, 64, 8)


@dataclass(slots=True)
class _Sequence:
    name: str
    slot: int
    tokens: list[int]
    pages: tuple[int, ...]
    computed: int = 0
    expected: list[Tensor] = field(default_factory=list)

    def row(self, end: int, prompt: int) -> Row:
        tokens = tuple(self.tokens[self.computed : end])
        place = (self.computed, tokens, self.pages)
        return Row(self.name, self.slot, *place, end >= prompt, _GREEDY, 0)


def tolerance(layers: int) -> float:
    """Of a row's relative error in bfloat16."""
    return 2**-8 * math.sqrt(6 * layers + 2) * 2


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: loraplex bench agreement --layers 4 --out agreement.json")
def main(
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
    layers: Annotated[int, typer.Option(help="Of the base.")] = 4,
    decode: Annotated[int, typer.Option(help="Tokens of each sequence after its prompt.")] = 6,
    device: Annotated[str, typer.Option(help="Of the engine under test.")] = "cuda",
) -> None:
    """Hold the CUDA engine's logits to the CPU's. Fails where they are further apart."""
    config = llama(layers)
    dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        write_base(Path(folder), random_base(config, device=torch.device(device), dtype=dtype))
        reference = Runner(
            base_dir=Path(folder), slots=3, max_rank=64, pages=_PAGES, page_tokens=_PAGE_TOKENS
        )
        weights = load_base(Path(folder), dtype, device)
        small = load_base(Path(folder), dtype, device, quantization=Quantization.FP8)
    runners = {"bfloat16": _fused(weights), "fp8 base": _fused(small)}
    _load([reference, *runners.values()], config)
    _follow(reference, sequences := _made(config), decode)
    results: dict[str, Any] = {}
    for name, runner in runners.items():
        results[f"{name}, mixed"] = _hold(runner, sequences)
        results[f"{name}, alone"] = _hold(runner, sequences, alone=True)
    limit = tolerance(layers)
    for name, result in results.items():
        print(f"{name}: {json.dumps(result)}")
    print(f"tolerance of the relative error in bfloat16: {limit:.4f}")
    if out is not None:
        facts = {
            "command": " ".join(["python -m replica.bench.agreement", *sys.argv[1:]]),
            "machine": machine(device),
            "layers": layers,
            "tolerance": limit,
        }
        out.write_text(json.dumps({**facts, "results": results}, indent=1))
    if max(results[f"bfloat16, {how}"]["error_max"] for how in ("mixed", "alone")) > limit:
        print("the engines are further apart than rounding explains", file=sys.stderr)
        raise typer.Exit(1)


def _fused(weights: BaseWeights) -> CudaRunner:
    return CudaRunner(
        weights=weights,
        slots=3,
        max_rank=64,
        pages=_PAGES,
        page_tokens=_PAGE_TOKENS,
        max_running=8,
        max_step_tokens=1024,
        max_model_len=1024,
        graph_sizes=(1, 8),
    )


def _load(runners: Iterable[StepRunner], config: ModelConfig) -> None:
    """Adapters into slots 0, 1, 2; the same numbers in each engine's dtype."""
    hosts = [
        random_adapter(f"a{i}", config, rank, dtype=torch.bfloat16, seed=i, pinned=False)
        for i, rank in enumerate(_RANKS)
    ]
    for runner in runners:
        free = list(range(_PAGES // 4, _PAGES))
        for slot, host in enumerate(hosts):
            flat = host.flat.float() if isinstance(runner, Runner) else host.flat
            copy = HostAdapter(host.adapter, host.digest, host.rank, flat, host.ranks)
            arrival = runner.load(slot, copy, [free.pop() for _ in range(runner.pages_of(copy))])
            while arrival is not None and not arrival.query():
                time.sleep(0.001)


def _made(config: ModelConfig) -> list[_Sequence]:
    dice, made, page = np.random.default_rng(3), [], 0
    for i, (length, adapter) in enumerate(_SEQUENCES):
        pages = tuple(range(page, page + 6))
        page += 6
        tokens = dice.integers(1000, config.vocab_size - 1000, length).tolist()
        made.append(_Sequence(f"s{i}", BASE_SLOT if adapter is None else adapter, tokens, pages))
    return made


def _steps(sequences: Sequence[_Sequence], prompts: dict[str, int]) -> Iterable[Step]:
    """The prompts in two chunks, then a token at a time."""
    for seq in sequences:
        seq.computed = 0
    halves = [{seq.name: max(1, prompts[seq.name] // 2) for seq in sequences}, prompts]
    for ends in halves:
        rows = [seq.row(ends[seq.name], prompts[seq.name]) for seq in sequences]
        yield Step(tuple(sorted(rows, key=lambda row: row.slot)))
        for seq in sequences:
            seq.computed = ends[seq.name]
    while any(seq.computed < len(seq.tokens) for seq in sequences):
        rows = [seq.row(seq.computed + 1, 0) for seq in sequences]
        yield Step(tuple(sorted(rows, key=lambda row: row.slot)))
        for seq in sequences:
            seq.computed += 1


def _follow(reference: Runner, sequences: Sequence[_Sequence], decode: int) -> None:
    """Draw with the reference, and keep its logits."""
    prompts = {seq.name: len(seq.tokens) for seq in sequences}
    for step in _steps(sequences, prompts):
        for name, logits in reference.logits(step).items():
            seq = next(seq for seq in sequences if seq.name == name)
            seq.expected.append(logits)
            if len(seq.expected) <= decode:
                seq.tokens.append(int(logits.argmax()))


def _hold(
    runner: CudaRunner, sequences: Sequence[_Sequence], *, alone: bool = False
) -> dict[str, Any]:
    errors: list[float] = []
    largest: list[float] = []
    agreed: list[bool] = []
    for together in [[seq] for seq in sequences] if alone else [list(sequences)]:
        prompts = {seq.name: len(seq.tokens) - len(seq.expected) + 1 for seq in together}
        told = {seq.name: iter(seq.expected) for seq in together}
        for step in _steps(together, prompts):
            for name, ours in runner.logits(step).items():
                theirs = next(told[name])
                off = ours.cpu() - theirs
                errors.append(float(off.norm() / theirs.norm()))
                largest.append(float(off.abs().max()))
                agreed.append(int(ours.argmax()) == int(theirs.argmax()))
    return {
        "rows": len(errors),
        "error_mean": round(sum(errors) / len(errors), 5),
        "error_max": round(max(errors), 5),
        "logit_off_max": round(max(largest), 4),
        "same_token": round(sum(agreed) / len(agreed), 4),
    }


if __name__ == "__main__":
    app(prog_name="loraplex bench agreement")
