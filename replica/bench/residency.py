"""`python -m replica.bench.residency`: many adapters of mixed ranks on the pages of a few.

The same requests run twice, Zipf 1.1 over all adapters: once with room for every one of them, and
once where adapters may have as many pages together as `resident` of them take on average, so that
the others come from pinned host memory as they are asked for. Told are throughput, how long a load
takes from the wish for it to its arrival, and what loads do to the tokens of others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer

from replica.bench.engine import cell, machine, milliseconds, quantile
from replica.bench.random_base import llama, small
from replica.bench.rig import Rig
from replica.bench.workload import Work
from replica.engine.quantised import Quantization

RANKS: Final = (8, 16, 32, 64)


def main(
    out: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
    adapters: Annotated[int, typer.Option(help="How many there are.")] = 500,
    resident: Annotated[int, typer.Option(help="Whose pages there are, on average.")] = 64,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 64,
    requests: Annotated[int, typer.Option(help="In all, in each run.")] = 512,
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
        quantization=Quantization.NONE,
        ranks=ranks,
        slots=adapters,
        cache_tokens=16 * pages + 768 * concurrency,
        max_running=concurrency,
        max_step_tokens=max(8192, concurrency),
        files=2,
    )
    wanted = [rig.runner.pages_of(host) for host in rig.hosts.values()]
    work = Work(concurrency, "zipf", requests=requests)
    if trial:
        work = Work(concurrency, "zipf", prompt=8, output=3, requests=requests)
    runs = {}
    few = max(resident * sum(wanted) // adapters, max(wanted))
    for name, limit in (("all", None), ("few", few)):
        rig.start(pages_max=limit)
        rig.run(work, seed=1)  # what is often asked for is resident after it, as in a server's life
        rig.loads_s.clear()
        runs[name] = _run(rig, work, limit)
        print(name, json.dumps(runs[name]))
    ratio = runs["few"]["output_tokens_per_s"] / runs["all"]["output_tokens_per_s"]
    print(f"throughput with the pages of {resident}: {ratio:.3f} of all resident")
    if out is not None:
        facts = {
            "command": " ".join(["python -m replica.bench.residency", *sys.argv[1:]]),
            "machine": machine(device),
            "adapter_pages": {"all": sum(wanted), "largest": max(wanted)},
            "ratio": round(ratio, 4),
        }
        out.write_text(json.dumps({**facts, "runs": runs}, indent=1))


def _run(rig: Rig, work: Work, limit: int | None) -> dict[str, Any]:
    result = cell(work, rig.run(work, seed=2))
    loads = rig.loads_s
    result |= {"pages_max": limit, "loads": len(loads)}
    if loads:
        result |= {
            "load_ms_p50": milliseconds(median(loads)),
            "load_ms_p99": milliseconds(quantile(loads, 0.99)),
        }
    return result


if __name__ == "__main__":
    typer.run(main)
