"""Find the fastest tilings on this GPU and write them as the table that `tiling.py` ships.

    python -m replica.bench.tune --out h200.json --raw tune.json

Every candidate is checked against float64 before it is timed. First each side of a module is
searched beside one partner; then the best two of either side are timed together, for launches
overlap and one side's shape moves the other's time. A line of the table serves several batches
(distinct and Zipf; for pools of rank 64 also mixed ranks): of the pairs that ran on all of them,
the one with the least geometric mean against each batch's best wins.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from replica.bench.cells import LLAMA_8B, MODULES, Bed, Cell, Work
from replica.bench.timing import ceilings, microseconds
from replica.engine.kernels import tiling
from replica.engine.kernels.gathered import GatheredLora
from replica.engine.kernels.tiling import Expand, Shrink, Tiling
from replica.engine.sections import tiles

TOLERANCE: Final = 2e-2
Times = dict[Tiling, float]
_MODULES: Final = ("q", "qkv", "gate_up", "down")


def candidates(cell: Cell) -> tuple[list[Shrink], list[Expand]]:
    """The first of each side is the other's partner."""
    K, ranks = cell.group.in_features, tiles(cell.max_rank) * 16
    if cell.prefill:
        return _prefill(K, ranks)
    f, tile = 1 if K <= 8192 else 2, min(16, cell.max_rank)
    rows = Shrink(True, 1024 * f, tile)
    dots = Shrink(False, 1024 * f, ranks, 128, stages=3 if ranks > 32 else 4)
    by_chunk = [dots, replace(dots, stages=4 if ranks > 32 else 6)]
    by_chunk.append(replace(dots, TR=16, BKI=256, stages=4))
    wide = Expand(True, 1024, tile)
    wides = [wide, replace(wide, WIDE=512, warps=2), replace(wide, WIDE=256, warps=1)]
    if ranks > 16 and cell.rows <= 8:
        wides += [Expand(True, 256, 32, warps=1), Expand(True, 256, 32, warps=2)]
    if ranks == 32:
        wides.append(Expand(True, 512, ranks, warps=2))
    dot = Expand(False, 512, BN=128, stages=3 if ranks > 32 else 4)
    by_dot = [dot, replace(dot, WIDE=1024), replace(dot, WIDE=1024, stages=4 if ranks > 32 else 6)]
    by_dot += [replace(dot, WIDE=columns, BN=256) for columns in (1024, 512, 256)]
    if cell.rows <= 8:
        return [rows, replace(rows, warps=8)], wides
    if cell.shared or cell.rows > 128:
        return by_chunk, [*by_dot, wide]
    return [rows, replace(rows, warps=8), *by_chunk[:2]], [*wides, *by_dot[1:4:2]]


def _prefill(K: int, ranks: int) -> tuple[list[Shrink], list[Expand]]:
    base = Shrink(False, K // 4, ranks, 64, stages=4, reduce=True, pdl=False)
    shrinks = [base, replace(base, BKI=128), replace(base, BK=K // 8)]
    shrinks += [replace(base, BKI=128, stages=3, reduce=False)]
    shrinks += [replace(base, BK=K // 8, BKI=128, stages=3), replace(base, stages=6)]
    wide = Expand(False, 1024, BN=128, pdl=False)
    expands = [wide, replace(wide, WIDE=512), replace(wide, WIDE=2048)]
    expands += [replace(wide, stages=4), replace(wide, WIDE=512, stages=4)]
    return shrinks, expands


def pairs(cell: Cell) -> list[Tiling]:
    """Each of either side beside the other's first, and pairs that only go together."""
    shrinks, expands = candidates(cell)
    found = [Tiling(each, expands[0]) for each in shrinks]
    found += [Tiling(shrinks[0], each) for each in expands[1:]]
    if cell.prefill:
        chained = replace(shrinks[2], pdl=True), replace(expands[1], pdl=True)
        found.append(Tiling(*chained))
    elif cell.shared and cell.rows > 8:
        tile = min(16, cell.max_rank)
        found.append(Tiling(Shrink(True, shrinks[0].BK, tile), Expand(True, 1024, tile)))
    return found


def cells() -> list[Cell]:
    found = []
    for module in _MODULES:
        for rank in (16, "mixed"):
            for rows in tiling.ROW_CLASSES:
                for mix in ("distinct", "zipf", "same")[: 3 if rows > 1 else 1]:
                    found.append(Cell(module, rank, rows, mix))
        for rows in (1, 32, 64, 256):
            found += [Cell(module, 64, rows, mix) for mix in ("distinct", "zipf")[: 1 + (rows > 1)]]
        for rank in (8, 32):
            found += [Cell(module, rank, rows, "distinct") for rows in (1, 8, 64, 128, 256)]
            found.append(Cell(module, rank, 2048, "16x128"))
        for rank in (16, 64, "mixed"):
            found += [Cell(module, rank, 2048, mix) for mix in ("4x512", "16x128", "1x2048")]
    return found


class _NoAdapter:
    """Tables large enough to compile for: kernels see shapes, never what is in them."""

    def __init__(self, max_rank: int) -> None:
        modules = len([m for group in LLAMA_8B.groups for m in group.modules])
        self.pool = torch.zeros(1, 1024, dtype=torch.bfloat16, device="cuda")
        shape = (2, LLAMA_8B.num_layers, modules)
        self.ranks = torch.zeros(shape, dtype=torch.int32, device="cuda")
        self.sections = torch.zeros((*shape, 2, tiles(max_rank)), dtype=torch.int64, device="cuda")


def _compile(job: tuple[str, int, int, bool, Tiling]) -> None:
    """Into Triton's cache on disk; a launch of no rows with an adapter runs nothing."""
    module, max_rank, rows, shared, cut = job
    groups, index = MODULES[module]
    lora = GatheredLora(_NoAdapter(max_rank), groups, max_rank)
    meta = lora.meta(rows, shared=shared)
    group = groups[index]
    x, y = (
        torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
        for width in (group.in_features, sum(group.out_features))
    )
    lora.add(x, y, 0, index, meta, cut)
    torch.cuda.synchronize()


def compile_all(todo: Sequence[Cell], processes: int) -> None:
    jobs = {(c.module, c.max_rank, c.rows, c.shared, cut) for c in todo for cut in pairs(c)}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        list(pool.map(_compile, sorted(jobs, key=str), chunksize=4))


def measure(bed: Bed, cell: Cell, cuts: Sequence[Tiling], calls: int = 96) -> Times:
    """The tilings that are right, and their times; one that is not is an error of ours."""
    work, times = Work(bed, cell, calls=calls), {}
    for cut in cuts:
        if (error := work.error(cut)) < TOLERANCE:
            times[cut] = microseconds(partial(_call, work, cut), work.calls)
        else:
            print(f"WRONG {cell.name()} {cut}: {error:.2g}", flush=True)
    return times


def _call(work: Work, cut: Tiling, i: int) -> None:
    work.call(i, cut)


def key_of(cell: Cell) -> str:
    return tiling.key(cell.group, cell.max_rank, tiling.row_class(cell.rows), cell.shared)


def classes(found: Mapping[Cell, Times]) -> dict[str, list[Times]]:
    """Cells' times by the line of the table that would serve them."""
    lines: dict[str, list[Times]] = defaultdict(list)
    for cell, times in found.items():
        lines[key_of(cell)].append(times)
    return lines


def ranking(of_class: Sequence[Times], cuts: Sequence[Tiling]) -> list[Tiling]:
    """Fastest first, of those that ran in every cell of the class."""
    full = [cut for cut in cuts if all(cut in times for times in of_class)]
    best = [min(times.values()) for times in of_class]
    return sorted(
        full, key=lambda cut: math.prod(t[cut] / b for t, b in zip(of_class, best, strict=True))
    )


def finalists(of_class: Sequence[Times], tried: Sequence[Tiling]) -> list[Tiling]:
    """The two best of either side, together."""
    partner = tried[0]
    shrinks = ranking(of_class, [cut for cut in tried if cut.expand == partner.expand])[:2]
    expands = ranking(of_class, [cut for cut in tried if cut.shrink == partner.shrink])[:2]
    pairs_ = [Tiling(s.shrink, e.expand) for s in shrinks for e in expands]
    return [cut for cut in pairs_ if not (cut.expand.rows and cut.shrink.reduce)]


def table_of(found: Mapping[Cell, Times]) -> dict[str, Any]:
    return {
        key: asdict(ranking(of_class, list(of_class[0]))[0])
        for key, of_class in classes(found).items()
    }


def sweep(
    todo: Sequence[Cell], cuts_of: Callable[[Cell], Sequence[Tiling]], found: dict[Cell, Times]
) -> None:
    bed = None
    for cell in sorted(todo, key=lambda each: str(each.rank)):
        if bed is None or bed.rank != cell.rank:
            bed = None
            bed = Bed(cell.rank)
        known = found.setdefault(cell, {})
        known |= measure(bed, cell, [cut for cut in cuts_of(cell) if cut not in known])
        best = min(known, key=lambda cut: known[cut])
        print(f"{cell.name()} {known[best]:.2f} {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m replica.bench.tune", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--raw", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--only", default="", help="parts of cells' names, by comma")
    options = parser.parse_args()
    begun = time.monotonic()
    todo = [c for c in cells() if any(part in c.name() for part in options.only.split(","))]
    compile_all(todo, options.processes)
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    found: dict[Cell, Times] = {}
    facts = ceilings()
    sweep(todo, pairs, found)
    tried = {key_of(cell): pairs(cell) for cell in todo}
    last = {key: finalists(of_class, tried[key]) for key, of_class in classes(found).items()}
    sweep(todo, lambda cell: last[key_of(cell)], found)
    raw = [
        asdict(cell) | {"times": [(asdict(cut), time_) for cut, time_ in times.items()]}
        for cell, times in found.items()
    ]
    options.raw.write_text(json.dumps({"ceilings": facts, "cells": raw}))
    lines = {"device": facts["device"], "tilings": table_of(found)}
    options.out.write_text(json.dumps(lines, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
