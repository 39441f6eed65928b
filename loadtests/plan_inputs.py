"""What a plan starts from, out of what was typed and the files that it names.

Everything here raises ValueError, with the option or the file and what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.cli.failure import Failure
from gateway.cli.size import LINEARS, Shapes, measure, read_shapes
from loadtests.calibration import measured as measured_times
from loadtests.demand import Sizes
from loadtests.machine import Machine

RANK_BYTES: Final = 5_242_880.0
"""One rank on all seven projections of Llama-3.1-8B, in bfloat16."""

_ITEM_BYTES: Final = 2
_RANK_MAX: Final = 1 << 16


def machine_of(
    model_config: Path | None,
    measured: Sequence[Path],
    short: tuple[float | None, float | None, int | None, float | None],
    changes: Sequence[str],
) -> Machine:
    """The later the stronger: the base's shapes, measurements, options, NAME=VALUE.

    `short`: GB of the GPU and of host memory, sequences at once, cost of a replica.
    """
    machine = Machine()
    if model_config is not None:
        machine = machine.with_values(_of_base(_shapes(model_config)))
    for path in measured:
        machine = machine.with_values(measured_times(path))
    gpu_gb, host_gb, capacity, cost = short
    told = {
        "gpu_bytes": None if gpu_gb is None else gpu_gb * 1e9,
        "host_bytes": None if host_gb is None else host_gb * 1e9,
        "capacity": capacity,
        "replica_per_hour": cost,
    }
    given = {name: value for name, value in told.items() if value is not None}
    return machine.with_values(given).changed(changes)


def sizes_of(ranks: str, adapter_list: Path | None, model_config: Path | None) -> Sizes:
    rank_bytes = RANK_BYTES
    if model_config is not None:
        rank_bytes = measure(_shapes(model_config), list(LINEARS), 1, _ITEM_BYTES)["bytes"]
    known = {} if adapter_list is None else _listed(adapter_list, rank_bytes)
    return Sizes(rank_bytes, _mix(ranks), known)


def _mix(text: str) -> tuple[tuple[int, float], ...]:
    """`8:60,16:40`; a rank alone has all."""
    mix = []
    for part in text.split(","):
        rank, _, weight = part.partition(":")
        try:
            mix.append((int(rank), float(weight or 1)))
        except ValueError:
            raise ValueError(f"--ranks {text}: RANK:WEIGHT, comma between, not {part!r}") from None
    if any(not 1 <= rank <= _RANK_MAX for rank, _ in mix):
        raise ValueError(f"--ranks {text}: a rank lies in 1..{_RANK_MAX}")
    if any(not 0 <= weight < math.inf for _, weight in mix) or not any(w for _, w in mix):
        raise ValueError(f"--ranks {text}: weights are at least 0, and one is above")
    return tuple(mix)


def _listed(path: Path, rank_bytes: float) -> dict[str, tuple[int, float]]:
    try:
        rows = orjson.loads(path.read_bytes())
        told = [(str(row["adapter"]), int(row["rank"]), float(row["size_bytes"])) for row in rows]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: not what `loraplex adapter list --json` prints: {error!r}"
        ) from error
    return {
        name: (rank, size or rank * rank_bytes)
        for name, rank, size in told
        if 1 <= rank <= _RANK_MAX
    }


def _shapes(path: Path) -> Shapes:
    try:
        return read_shapes(path)
    except Failure as failure:
        raise ValueError(str(failure)) from failure


def _of_base(shapes: Shapes) -> dict[str, Any]:
    keys, values = shapes.linears["k_proj"][0], shapes.linears["v_proj"][0]
    return {
        "base_bytes": float(_ITEM_BYTES * shapes.base_weights),
        "kv_token_bytes": float(_ITEM_BYTES * shapes.layers * (keys + values)),
    }
