"""Rows into a file: CSV, JSON lines or Parquet. A file that is there is replaced once all is in it.

Parquet is written by pyarrow, which is its own extra (`pip install 'loraplex[parquet]'`, some
40 MB): a format with a reader in every warehouse deserves the writer those readers are tested with.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final

from gateway.cli.failure import Failure

Columns = Mapping[str, type]
"""Name and type (str, int, float or bool) of each."""

_GROUP: Final = 50_000  # rows held in memory, and in one group of a Parquet file


class Form(StrEnum):
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


def write(rows: Iterator[Mapping[str, Any]], columns: Columns, form: Form, path: Path) -> int:
    """How many rows. Raises Failure when the file cannot be written."""
    if form is Form.PARQUET:
        _require_pyarrow()
    writer = {Form.CSV: _csv, Form.JSON: _json, Form.PARQUET: _parquet}[form]
    partial = path.with_name(path.name + ".part")
    try:
        count = writer(rows, columns, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return count


def _csv(rows: Iterator[Mapping[str, Any]], columns: Columns, path: Path) -> int:
    count = 0
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([row.get(name) for name in columns])
            count += 1
    return count


def _json(rows: Iterator[Mapping[str, Any]], columns: Columns, path: Path) -> int:
    count = 0
    with path.open("w") as file:
        for row in rows:
            shown = {name: row.get(name) for name in columns}
            file.write(json.dumps(shown, ensure_ascii=False) + "\n")
            count += 1
    return count


def _require_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        raise Failure("Parquet needs pyarrow: pip install 'loraplex[parquet]'") from None


def _parquet(rows: Iterator[Mapping[str, Any]], columns: Columns, path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
    schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
    count = 0
    with pq.ParquetWriter(path, schema) as writer:
        while group := list(islice(rows, _GROUP)):
            held = {name: [row.get(name) for row in group] for name in columns}
            writer.write_table(pa.table(held, schema=schema))
            count += len(group)
    return count
