"""`python -m replica.bench.residency`: many adapters of mixed ranks on the pages of a few.

The same requests run twice, Zipf 1.1 over all adapters: once with room for every one of them, and
once where adapters may have as many pages together as `resident` of them take on average, so that
the others come from pinned host memory as they are asked for. Both are done in a closed loop, which
tells throughput, and in an open one with the same random moments of arrival, which tells what a
load costs: the request that waits for it, by its first token against those whose adapter was there,
and against itself where all are; and others, by the gaps between their tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import numpy as np
import typer

from replica.bench.engine import cell, machine, milliseconds, quantile
from replica.bench.loops import Measured
from replica.bench.random_base import llama, small
from replica.bench.rig import Rig
from replica.bench.workload import Work
from replica.engine.quantised import Quantization

RANKS: Final = (8, 16, 32, 64)
_WARM: Final = 901
"""Seed of the requests that run first: what is often asked for is resident after them, as in a
server's life."""


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    epilog="Example: loraplex bench residency --adapters 500 --resident 64 --out residency.json"
)
def main(
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
    adapters: Annotated[int, typer.Option(help="How many there are.")] = 500,
    resident: Annotated[int, typer.Option(help="Whose pages there are, on average.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests in flight, at most.")] = 64,
    requests: Annotated[int, typer.Option(help="In all, in each run.")] = 512,
    rate: Annotated[float, typer.Option(help="Requests a second in the open loop.")] = 32.0,
    quantization: Annotated[Quantization, typer.Option(help="Of the base.")] = Quantization.NONE,
    layers: Annotated[int, typer.Option(help="Of the base; 32 is Llama-3.1-8B.")] = 32,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial of the program.")] = "cuda",
) -> None:
    """Compare adapters that come and go with adapters that are all there."""
    trial = device == "cpu"
    config = small() if trial else llama(layers)
    ranks = [RANKS[(i * 7) % len(RANKS)] for i in range(adapters)]
    pages = 60 * adapters if trial else 84 * adapters
    rig = Rig(
        config,
        device=device,
        quantization=quantization,
        ranks=ranks,
        slots=adapters,
        cache_tokens=16 * pages + 768 * concurrency,
        max_running=concurrency,
        max_step_tokens=max(8192, concurrency),
        files=2,
    )
    wanted = [rig.runner.pages_of(host) for host in rig.hosts.values()]
    few = max(resident * sum(wanted) // adapters, max(wanted))
    lengths = {"prompt": 8, "output": 3} if trial else {}
    work = Work(concurrency, "zipf", requests=requests, **lengths)
    moments = np.random.default_rng(5).exponential(1 / rate, requests).cumsum().tolist()
    runs, measured = {}, {}
    for name, limit in (("all", None), ("few", few)):
        rig.start(pages_max=limit)
        rig.run(work, seed=_WARM)
        for loop, arrivals_s in (("closed", None), ("open", moments)):
            rig.loads_s.clear()
            of = f"{loop}, {name}"
            measured[of] = rig.run(work, seed=2, arrivals_s=arrivals_s)
            runs[of] = cell(work, measured[of]) | _loads(rig, measured[of], limit)
            print(of, json.dumps(runs[of]), flush=True)
    verdict = compare(runs, measured["open, all"], measured["open, few"])
    print("\n".join(f"{what}: {value}" for what, value in verdict.items()))
    if out is not None:
        facts = {
            "command": " ".join(["python -m replica.bench.residency", *sys.argv[1:]]),
            "machine": machine(device),
            "quantization": quantization.value,
            "rate": rate,
            "adapter_pages": {"all": sum(wanted), "largest": max(wanted)},
        }
        out.write_text(json.dumps({**facts, **verdict, "runs": runs}, indent=1))


def _loads(rig: Rig, run: Measured, limit: int | None) -> dict[str, Any]:
    told: dict[str, Any] = {"pages_max": limit, "loads": len(rig.loads_s)}
    if rig.loads_s:
        told["load_ms_p50"] = milliseconds(median(rig.loads_s))
        told["load_ms_p99"] = milliseconds(quantile(rig.loads_s, 0.99))
    waited = {
        name: [s for request, s in run.first_s.items() if (request in run.missed) is missed]
        for name, missed in (("hit", False), ("miss", True))
    }
    for name, first_s in waited.items():
        told[f"{name}_requests"] = len(first_s)
        if first_s:
            told[f"{name}_first_token_ms_p50"] = milliseconds(median(first_s))
            told[f"{name}_first_token_ms_p90"] = milliseconds(quantile(first_s, 0.9))
    return told


def compare(runs: dict[str, dict[str, Any]], quiet: Measured, busy: Measured) -> dict[str, Any]:
    """`quiet` and `busy` are open loops of the same requests at the same moments."""

    def ratio(loop: str, of: str) -> float:
        return round(float(runs[f"{loop}, few"][of] / runs[f"{loop}, all"][of]), 4)

    order = dict(zip(busy.texts, quiet.texts, strict=True))  # ids differ, the requests do not
    missed = [request for request in busy.first_s if request in busy.missed]
    pairs = [busy.first_s[request] - quiet.first_s[order[request]] for request in missed]
    mixed = runs["open, few"]
    told: dict[str, Any] = {
        "throughput_ratio": ratio("closed", "output_tokens_per_s"),
        "token_gap_p99_ratio": ratio("open", "token_gap_ms_p99"),
        "token_gap_p99_ratio_closed": ratio("closed", "token_gap_ms_p99"),
    }
    if pairs:
        slower = mixed["miss_first_token_ms_p50"] - mixed["hit_first_token_ms_p50"]
        told["miss_added_ms_p50"] = round(slower, 3)
        told["miss_added_ms_p50_against_all_resident"] = milliseconds(median(pairs))
    return told


if __name__ == "__main__":
    app(prog_name="loraplex bench residency")
