"""Calibration: a machine's times from what was measured.

Two forms of JSON are understood. What `loraplex bench engine --out` writes: its cells say how long
a step took at so many rows with so many different adapters, and

    step = step_s + row_s * rows + adapter_s * adapters

is fitted to them by least squares, each cell by the inverse of its step so that short ones count
as much as long ones; the time of a prompt token is what the last first token took beyond a step,
over all prompts, where that was longest. And any object whose `machine` (or `prices`, as
`loraplex simulate --json` writes) holds names and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import orjson

from loadtests.machine import Machine

_RESIDENT: Final = 64  # adapters that the benchmark draws from


def measured(path: Path) -> dict[str, float]:
    """Values for `Machine.with_values`. Raises ValueError, saying what the file lacks."""
    try:
        told = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if isinstance(told, dict):
        if isinstance(told.get("cells"), list):
            return fitted(told["cells"])
        for name in ("machine", "prices"):
            values = told.get(name)
            if isinstance(values, dict) and (known := _known(values)):
                return known
    raise ValueError(
        f"{path}: neither the JSON of `loraplex bench engine` nor an object with a `machine` of "
        f"{', '.join(field.name for field in fields(Machine))}"
    )


def fitted(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Raises ValueError when the cells cannot tell the three apart."""
    try:
        rows = [_row(cell) for cell in cells if cell["mix"] != "zipf"]
        several = [c for c in cells if c["mix"] == "none" and c["concurrency"] > 1]
        prompts = [_prompt_token_s(cell) for cell in several]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a cell of the benchmark lacks {error}") from error
    if not prompts:
        raise ValueError("the benchmark has no cell without adapters above one row")
    step_s, row_s, adapter_s = _least_squares(rows)
    return {
        "step_s": step_s,
        "row_s": max(row_s, 0.0),
        "adapter_s": max(adapter_s, 0.0),
        "prompt_token_s": max(prompts),
    }


def _row(cell: dict[str, Any]) -> tuple[float, float, float, float]:
    """(1, rows, adapters, 1 s) over the step."""
    rows = cell["concurrency"]
    adapters = {"none": 0, "one": 1, "distinct": min(rows, _RESIDENT)}[cell["mix"]]
    step_s = cell["step_ms_p50"] / 1e3
    return 1 / step_s, rows / step_s, adapters / step_s, 1.0


def _prompt_token_s(cell: dict[str, Any]) -> float:
    """All prompts came at once: the last first token came when all of them were read."""
    waited_s = (cell["first_token_ms_max"] - cell["step_ms_p50"]) / 1e3
    return float(waited_s / (cell["prompt"] * cell["concurrency"]))


def _least_squares(rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, ...]:
    """The normal equations of three unknowns, by elimination."""
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(3)]
    least = [1e-9 * matrix[i][i] for i in range(3)]
    for i in range(3):
        pivot = max(range(i, 3), key=lambda at: abs(matrix[at][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) <= least[i]:
            raise ValueError("the benchmark's cells do not vary in rows and adapters")
        for j in range(3):
            if j != i:
                part = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - part * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return tuple(matrix[i][3] / matrix[i][i] for i in range(3))


def _known(values: dict[str, Any]) -> dict[str, float]:
    names = {field.name for field in fields(Machine)}
    return {
        name: value
        for name, value in values.items()
        if name in names and isinstance(value, int | float) and not isinstance(value, bool)
    }
