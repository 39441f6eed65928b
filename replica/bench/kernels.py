"""`python -m replica.bench.kernels`: the gathered kernels of one Llama-3.1-8B layer on this GPU.

Every cell is a module, a rank class, a number of rows and a mix of adapters. Its output is checked
against float64 first, then timed through the arena's tables beside the base's own product, with the
metadata an engine would build: graphs of the same shapes serve any mix. Floor = the bytes of the
distinct adapters, x and twice y at the copy bandwidth measured in the same run, or the operations
at the matrix rate. Peers' best times come from a file recorded on the same kind of card.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from replica.bench.cells import BF16, LLAMA_8B, Bed, Cell, RankClass, Work
from replica.bench.timing import ceilings, microseconds

TOLERANCE: Final = 2e-2
_PEERS: Final = Path("loadtests/results/peers_kernels.json")
_GROUPS: Final = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Goal:
    """Against the best peer of each cell, and against the floor: t <= times * floor + plus µs."""

    name: str
    applies: Callable[[Cell], bool]
    mean: float
    worst: float
    times: float
    plus: float


def _decode(cell: Cell, few: int, many: int) -> bool:
    return few <= cell.rows <= many


GOALS: Final = (
    Goal("decode <= 64 rows, rank 8 and 16",
         lambda c: _decode(c, 1, 64) and c.rank in (8, 16), 0.50, 0.70, 1.5, 3.5),
    Goal("decode <= 64 rows, mixed ranks",
         lambda c: _decode(c, 1, 64) and c.rank == "mixed", 0.45, 0.65, 2, 4),
    Goal("decode <= 64 rows, rank 32",
         lambda c: _decode(c, 1, 64) and c.rank == 32, 0.70, 0.90, 1.5, 3.5),
    Goal("decode 128-256 rows, rank 8-32 and mixed",
         lambda c: _decode(c, 65, 256) and c.rank != 64, 0.65, 0.85, 2, 3.5),
    Goal("decode, rank 64", lambda c: _decode(c, 1, 256) and c.rank == 64, 0.90, 0.90, 2, 4),
    Goal("prefill 2048, rank <= 32 and mixed",
         lambda c: c.prefill and c.rank != 64, 0.85, 0.85, 2, 0),
    Goal("prefill 2048, rank 64", lambda c: c.prefill and c.rank == 64, 1.0, 1.0, 2, 0),
)  # fmt: skip


def cells_of(peers: dict[str, Any], only: Sequence[str]) -> list[Cell]:
    found = [Cell(p["module"], p["rank"], p["rows"], p["mix"]) for p in peers["cells"]]
    found = [cell for cell in found if any(part in cell.name() for part in only)]
    return sorted(found, key=lambda c: (str(c.rank), c.module, c.rows, c.mix))


def run_cell(bed: Bed, cell: Cell, ceiling: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError when the kernels are wrong."""
    work = Work(bed, cell)
    if not (error := work.error()) < TOLERANCE:
        raise ValueError(f"{cell.name()}: an error of {error:.2g} of what was added")
    ours = microseconds(partial(_call, work), work.calls)
    floor = max(work.bytes / ceiling["copy_gb_s"] / 1e3, work.flops / ceiling["bf16_tflop_s"] / 1e6)
    return {
        "module": cell.module, "rank": cell.rank, "rows": cell.rows, "mix": cell.mix,
        "ours_us": ours, "floor_us": floor, "base_us": _base(cell), "error": error,
    }  # fmt: skip


def _call(work: Work, i: int) -> None:
    work.call(i)


def _base(cell: Cell) -> float:
    """cuBLAS x Wᵀ over rotating W."""
    K, N = cell.group.in_features, sum(cell.group.out_features)
    count = max(2, math.ceil(200e6 / (2 * K * N)))
    W = torch.randn(count, N, K, device="cuda", dtype=BF16)
    x, y = (torch.randn(cell.rows, n, device="cuda", dtype=BF16) for n in (K, N))
    return microseconds(lambda i: torch.mm(x, W[i % count].t(), out=y), max(4, min(64, count)))


def run_layer(bed: Bed, rank: RankClass, rows: int, mix: str) -> dict[str, Any]:
    """32 layers of the four base products in one graph, without and with the adapters."""
    works = [Work(bed, Cell(name, rank, rows, mix)) for name in _GROUPS]
    layers = LLAMA_8B.num_layers
    weights = [
        torch.randn(layers, w.ys[0].shape[1], w.xs[0].shape[1], device="cuda", dtype=BF16).mul_(
            0.02
        )
        for w in works
    ]

    def step(_: int, *, adapters: bool) -> None:
        for layer in range(layers):
            for work, W in zip(works, weights, strict=True):
                torch.mm(work.xs[0], W[layer].t(), out=work.ys[0])
                if adapters:
                    work.lora.add(work.xs[0], work.ys[0], layer, work.index, work.metas[0])

    base = microseconds(partial(step, adapters=False), 1) / layers
    ours = microseconds(partial(step, adapters=True), 1) / layers
    return {"rank": rank, "rows": rows, "mix": mix, "base_us": base, "ours_us": ours}


def run_paging(beds: dict[bool, Bed], cell: Cell) -> dict[str, Any]:
    """The same adapters in one run of pages each, and in pages dealt out at random."""
    times = {}
    for contiguous, bed in beds.items():
        work = Work(bed, cell)
        times[contiguous] = microseconds(partial(_call, work), work.calls)
    return {"cell": cell.name(), "contiguous_us": times[True], "dealt_us": times[False]}


def run_update(rows: int) -> dict[str, float]:
    """Building a step's metadata: once a step, not once a layer."""
    work = Work(Bed(16), Cell("o", 16, rows, "zipf"))
    slots = torch.tensor(work.batches[0], dtype=torch.int32, device="cuda")
    return {"rows": rows, "us": microseconds(lambda _: work.metas[0].update(slots), 50)}


def with_peers(row: dict[str, Any], peers: dict[str, Any], kind: str) -> dict[str, Any]:
    same = ("module", "rank", "rows", "mix") if kind == "cells" else ("rank", "rows", "mix")
    for each in peers[kind]:
        if all(each[name] == row[name] for name in same):
            extra = {"peer_us": each["best_us"], "peer": each["best"]}
            if kind == "layers":
                extra["peer_base_us"] = each["base_us"]
            return row | extra
    return row


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each goal against what was measured."""
    found = []
    for goal in GOALS:
        mine = [
            row for row in rows
            if goal.applies(Cell(row["module"], row["rank"], row["rows"], row["mix"]))
        ]  # fmt: skip
        ratios = [row["ours_us"] / row["peer_us"] for row in mine]
        if not ratios:
            continue
        within = [row["ours_us"] <= goal.times * row["floor_us"] + goal.plus for row in mine]
        found.append({
            "goal": goal.name, "cells": len(mine),
            "mean": math.prod(ratios) ** (1 / len(ratios)), "mean_goal": goal.mean,
            "worst": max(ratios), "worst_goal": goal.worst,
            "over": sum(ratio > goal.worst for ratio in ratios),
            "within_floor": sum(within), "floor_goal": f"{goal.times} x floor + {goal.plus}",
        })  # fmt: skip
    return found


def tell(result: dict[str, Any]) -> None:
    print(json.dumps(result["ceilings"]))
    print(
        "| module | rank | rows | adapters | floor | base | best peer | ours | x peer | x floor |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for r in result["cells"]:
        print(
            f"| {r['module']} | {r['rank']} | {r['rows']} | {r['mix']} | {r['floor_us']:.2f} | "
            f"{r['base_us']:.1f} | {r['peer_us']:.2f} ({r['peer']}) | {r['ours_us']:.2f} | "
            f"{r['ours_us'] / r['peer_us']:.2f} | {r['ours_us'] / r['floor_us']:.1f} |"
        )
    for r in result["layers"]:
        extra, peer = r["ours_us"] / r["base_us"] - 1, r["peer_us"] / r["peer_base_us"] - 1
        print(
            f"layer r{r['rank']} {r['rows']} {r['mix']}: base {r['base_us']:.1f} µs, ours "
            f"+{extra:.0%}, best peer +{peer:.0%}: {extra / peer:.2f}"
        )
    for name in ("paging", "update"):
        for r in result[name]:
            print(name, json.dumps(r))
    for r in result["goals"]:
        print(
            f"{r['goal']}: {r['cells']} cells, mean {r['mean']:.2f} (goal {r['mean_goal']}), worst "
            f"{r['worst']:.2f} (goal {r['worst_goal']}, {r['over']} over), {r['within_floor']} "
            f"within {r['floor_goal']}"
        )


def measure(peers: dict[str, Any], only: Sequence[str], seconds: float) -> dict[str, Any]:
    begun = time.monotonic()
    result: dict[str, Any] = {
        "command": " ".join(["loraplex bench kernels", *sys.argv[1:]]),
        "ceilings": ceilings(), "cells": [], "layers": [], "paging": [], "update": [],
    }  # fmt: skip
    bed: Bed | None = None
    for cell in cells_of(peers, only):
        if time.monotonic() - begun > seconds:
            print("out of time", file=sys.stderr)
            break
        if bed is None or bed.rank != cell.rank:
            bed = None
            bed = Bed(cell.rank)
        row = run_cell(bed, cell, result["ceilings"])
        result["cells"].append(with_peers(row, peers, "cells"))
    for each in sorted(peers["layers"], key=lambda each: str(each["rank"])):
        name = f"layer r{each['rank']} {each['rows']} {each['mix']}"
        if any(part in name for part in only) and time.monotonic() - begun < seconds:
            if bed is None or bed.rank != each["rank"]:
                bed = None
                bed = Bed(each["rank"])
            row = run_layer(bed, each["rank"], each["rows"], each["mix"])
            result["layers"].append(with_peers(row, peers, "layers"))
    if "" in only:
        beds = {contiguous: Bed(16, contiguous=contiguous) for contiguous in (True, False)}
        for rows in (1, 8, 32, 64):
            for module in _GROUPS:
                result["paging"].append(run_paging(beds, Cell(module, 16, rows, "distinct")))
        result["update"] = [run_update(rows) for rows in (8, 64, 256, 2048)]
    result["goals"] = summary(result["cells"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="loraplex bench kernels",
        description=__doc__,
        epilog="Example: loraplex bench kernels --only 'qkv r16 64,layer r16' --out kernels.json",
    )
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--peers", type=Path, default=_PEERS, help="peers' times by cell, JSON")
    parser.add_argument("--only", default="", help="parts of cells' names, by comma: `qkv r16 64`")
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "no CUDA device here: these are times of kernels on a GPU\n")
    if not options.peers.is_file():
        parser.exit(2, f"--peers: no file {options.peers}; run it from the repository's root\n")
    peers = json.loads(options.peers.read_text())
    result = measure(peers, options.only.split(","), options.seconds)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    tell(result)


if __name__ == "__main__":
    main()
