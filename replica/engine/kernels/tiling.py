"""Tiling: how one module's shrink and expand are cut, and the table that says which cut is fastest.

The table is found by measurement (`python -m replica.bench.tune`), one file a GPU model beside this
one, and asked by module (its K and N), rank class, rows and whether rows share adapters. Whatever
is not in it, and every other GPU, takes `default`.

Of all these numbers only the shrink's BK and whether rows or chunks are multiplied reach a result's
last bits, for they set the order of summation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from replica.engine.model_config import Group

ROW_CLASSES: Final = (1, 8, 32, 64, 128, 256)
"""A step takes the table's line for the smallest class that holds its rows; beyond it: prefill."""


@dataclass(frozen=True, slots=True)
class Shrink:
    rows: bool  # a row at a time in registers, else chunks of rows through `tl.dot`
    BK: int  # columns of x in one plane; reaches results
    TR: int  # ranks of a program
    BKI: int = 0  # chunks: columns of x at a time
    warps: int = 4
    stages: int = 3
    reduce: bool = False  # chunks: planes are added up at the end of the shrink
    pdl: bool = True


@dataclass(frozen=True, slots=True)
class Expand:
    rows: bool
    WIDE: int  # columns of y of a program
    RB: int = 16  # rows: ranks at a time
    BN: int = 0  # chunks: columns of y at a time
    warps: int = 4
    stages: int = 3
    pdl: bool = True


@dataclass(frozen=True, slots=True)
class Tiling:
    shrink: Shrink
    expand: Expand


def rank_class(tiles: int, max_rank: int) -> int:
    """8, 16, 32, 64, 128 or 256: kernels are specialised for the pool's largest rank."""
    return 8 if max_rank <= 8 else 16 * (1 << (tiles - 1).bit_length())


def row_class(rows: int) -> int:
    """0 is prefill."""
    return next((limit for limit in ROW_CLASSES if rows <= limit), 0)


def default(K: int, tiles: int, max_rank: int, rows: int, shared: bool) -> Tiling:
    """A sensible cut for any module on any GPU: of a program's tiles at most 100 KiB are shared
    memory, up to rank 256."""
    tile, ranks = min(16, max_rank), min(64, max(16, _pow2(16 * tiles)))
    columns = 128 if tiles <= 4 else 64 if tiles <= 8 else 32
    if rows > ROW_CLASSES[-1]:
        cut = Shrink(False, max(64, _pow2(K) // 4), ranks, 64, stages=4, reduce=True, pdl=False)
        return Tiling(cut, Expand(False, 512, BN=columns, pdl=False))
    plane = _pow2(min(K, 1024 if K <= 8192 else 2048))
    if shared or rows > 128:
        cut = Shrink(False, plane, ranks, min(plane, 128), stages=4, reduce=tiles > 4)
        return Tiling(cut, Expand(False, 512, BN=columns, stages=4))
    return Tiling(Shrink(True, plane, tile), Expand(True, 1024, tile))


def key(group: Group, rank: int, rows: int, shared: bool) -> str:
    widths = "+".join(map(str, group.out_features))
    return f"{group.in_features}>{widths} r{rank} m{rows}{' shared' if shared else ''}"


@cache
def table(device: str) -> dict[str, Tiling]:
    """`device` is the GPU's name; empty where no table ships."""
    name = device.lower().replace("nvidia", "").strip().replace(" ", "_")
    path = Path(__file__).with_name(f"{name}.json")
    if not path.is_file():
        return {}
    lines: dict[str, dict[str, Any]] = json.loads(path.read_text())["tilings"]
    return {
        name: Tiling(Shrink(**line["shrink"]), Expand(**line["expand"]))
        for name, line in lines.items()
    }


def choose(device: str, group: Group, tiles: int, max_rank: int, rows: int, shared: bool) -> Tiling:
    """The table's line for these rows, or for the next more that it has."""
    lines, rank, least = table(device), rank_class(tiles, max_rank), row_class(rows)
    for limit in [each for each in ROW_CLASSES if each >= least] if least else [0]:
        for sharing in (shared, False):
            if line := lines.get(key(group, rank, limit, sharing)):
                return line
    return default(group.in_features, tiles, max_rank, rows, shared)


def _pow2(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
