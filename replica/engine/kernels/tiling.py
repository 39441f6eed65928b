"""Tiling: how one module's shrink and expand are cut, and the table that says which cut is fastest.

The table is found by measurement (`python -m replica.bench.tune`), one file a GPU model beside this
one, and asked by module (its K and N), rank class, rows and whether rows share adapters. Whatever
is not in it, and every other GPU, takes `default`.

BK is the one number that reaches results: it sets the order of summation. It depends on the module
and the form only, never on the rows of a step.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from replica.engine.model_config import Group

Form = Literal["rows", "tiles", "columns"]
ROW_CLASSES: Final = (1, 8, 32, 64, 128, 256)
"""A step takes the table's line for the smallest class that holds its rows; beyond it: prefill."""


@dataclass(frozen=True, slots=True)
class Tiling:
    form: Form  # rows: multiply in registers; tiles, columns: `tl.dot`
    BK: int  # columns of x in one plane
    BKI: int  # of them at a time; rows form: unused
    TR: int  # ranks of a shrink program
    RB: int  # ranks of an expand program at a time
    BN: int  # columns of y at a time
    COLUMNS: int = 1  # columns form: tiles of BN a program streams
    shrink_warps: int = 4
    expand_warps: int = 4
    stages: int = 3
    reduce: bool = False  # planes are added up by the shrink
    pdl: bool = True


def rank_class(tiles: int, max_rank: int) -> int:
    """8, 16, 32, 64, 128 or 256: kernels are specialised for the pool's largest rank."""
    return 8 if max_rank <= 8 else 16 * (1 << (tiles - 1).bit_length())


def row_class(rows: int) -> int:
    """0 is prefill."""
    return next((limit for limit in ROW_CLASSES if rows <= limit), 0)


def default(K: int, tiles: int, max_rank: int, rows: int, shared: bool) -> Tiling:
    """A sensible cut for any module on any GPU."""
    width = _pow2(min(K, 1024 if K <= 8192 else 2048))
    block = min(64, rank_class(tiles, max_rank))
    if rows > ROW_CLASSES[-1]:
        plane = _pow2(K) if tiles > 1 and K <= 8192 else max(64, _pow2(K) // 4)
        ranks, columns = max(16, block), 256 if tiles < 4 else 128
        return Tiling("tiles", plane, min(64, plane), ranks, ranks, columns, reduce=True, pdl=False)
    if shared or (rows > 64 and tiles < 4):
        return Tiling("tiles", width, min(256, width), 16, 16, 256)
    return Tiling("rows", width, width, min(16, block), min(16, block), 512)


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
    return {name: Tiling(**line) for name, line in lines.items()}


def choose(device: str, group: Group, tiles: int, max_rank: int, rows: int, shared: bool) -> Tiling:
    lines = table(device)
    rank, limit = rank_class(tiles, max_rank), row_class(rows)
    for sharing in (shared, not shared):
        if line := lines.get(key(group, rank, limit, sharing)):
            return line
    return default(group.in_features, tiles, max_rank, rows, shared)


def as_json(tiling: Tiling) -> dict[str, Any]:
    return asdict(tiling)


def _pow2(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()
