"""SafetensorsHeader: names, types, shapes and places of tensors, before any tensor is read.

The format (huggingface/safetensors): eight bytes N, little endian; N bytes of JSON; then the data,
which the entries must tile exactly. Parsed here rather than by the library because an upload
deserves the reason it was refused, and because nothing of it is trusted until all of it fits.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from replica.engine.bad_adapter import BadAdapter

HEADER_MAX_BYTES: Final = 4 << 20
_LFS_MAGIC: Final = b"version https://git-lfs"

ITEM_BYTES: Final = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int


def read_header(file: BinaryIO, size_bytes: int, name: str) -> dict[str, TensorEntry]:
    """Entries by tensor name; raises BadAdapter `lfs_pointer` or `corrupt_file`."""
    head = file.read(8)
    if (head + file.read(len(_LFS_MAGIC) - 8)).startswith(_LFS_MAGIC):
        raise BadAdapter(
            "lfs_pointer", f"{name} is a Git-LFS pointer, not weights: run `git lfs pull`", name
        )
    length = int.from_bytes(head, "little")
    if HEADER_MAX_BYTES < length <= size_bytes - 8:
        raise _corrupt(name, f"its header of {length} bytes is longer than {HEADER_MAX_BYTES}")
    if len(head) < 8 or not 0 < length <= size_bytes - 8:
        raise _corrupt(name, f"no safetensors header in its {size_bytes} bytes")
    file.seek(8)
    try:
        raw = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        entries = {
            key: _entry(value, data_start=8 + length)
            for key, value in raw.items()
            if key != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _corrupt(name, f"unreadable header ({error})") from error
    _check_tiling(entries, 8 + length, size_bytes, name)
    return entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("a key occurs twice")
    return keys


def _entry(raw: Any, data_start: int) -> TensorEntry:
    dtype, shape, (start, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
    if any(type(value) is not int or value < 0 for value in (*shape, start, end)):
        raise ValueError("a shape or offset is not a natural number")
    if end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{dtype} {list(shape)} does not fill {end - start} bytes")
    return TensorEntry(dtype, shape, data_start + start, data_start + end)


def _check_tiling(entries: dict[str, TensorEntry], start: int, size_bytes: int, name: str) -> None:
    at = start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != at:
            raise _corrupt(name, "tensors overlap or leave a gap")
        at = entry.end
    if at != size_bytes:
        raise _corrupt(name, f"the header describes {at} bytes, the file has {size_bytes}")


def _corrupt(name: str, why: str) -> BadAdapter:
    return BadAdapter("corrupt_file", f"{name}: {why}; upload it again", name)
