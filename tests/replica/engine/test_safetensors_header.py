"""The header parser against the library's writer, and against bytes nobody vouches for."""

from __future__ import annotations

import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from replica.engine.bad_adapter import BadAdapter
from replica.engine.safetensors_header import TensorEntry, read_header

GOOD = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)})


def _read(data: bytes) -> dict[str, TensorEntry]:
    return read_header(io.BytesIO(data), len(data), "f")


def _file(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_entries_are_where_the_library_put_them() -> None:
    entries = _read(GOOD)
    assert entries["a"].dtype == "F32"
    assert entries["a"].shape == (2, 3)
    a = torch.frombuffer(
        bytearray(GOOD[entries["a"].start : entries["a"].end]), dtype=torch.float32
    )
    assert a.tolist() == [0, 1, 2, 3, 4, 5]
    assert entries["b"].shape == (4,)


@given(st.integers(0, len(GOOD) - 1))
def test_a_file_cut_anywhere_is_corrupt(length: int) -> None:
    with pytest.raises(BadAdapter, match="corrupt_file"):
        _read(GOOD[:length])


@given(st.binary(max_size=200))
def test_noise_is_refused_and_never_crashes(data: bytes) -> None:
    with pytest.raises(BadAdapter):
        _read(data)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_one_changed_byte_never_makes_entries_leave_the_file(place: int, byte: int) -> None:
    data = bytearray(GOOD)
    data[place] = byte
    try:
        entries = _read(bytes(data))
    except BadAdapter:
        return
    assert all(8 <= entry.start <= entry.end <= len(GOOD) for entry in entries.values())


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": ENTRY | {"dtype": "F99"}},
        {"a": ENTRY | {"shape": [2]}},
        {"a": ENTRY | {"shape": [-1]}},
        {"a": ENTRY | {"shape": [True]}},
        {"a": ENTRY | {"data_offsets": [4, 8]}},
        {"a": ENTRY, "b": ENTRY},
        {"a": ENTRY | {"data_offsets": [0]}},
        {"a": [1]},
        {"a": {"dtype": "F32"}},
        [],
        {},
    ],
    ids=str,
)
def test_headers_that_do_not_tile_the_data_are_corrupt(header: object) -> None:
    with pytest.raises(BadAdapter, match="corrupt_file"):
        _read(_file(header, b"\0" * 4))


def test_a_key_that_occurs_twice_is_corrupt() -> None:
    text = f'{{"a": {json.dumps(ENTRY)}, "a": {json.dumps(ENTRY)}}}'.encode()
    with pytest.raises(BadAdapter, match="corrupt_file"):
        _read(len(text).to_bytes(8, "little") + text + b"\0" * 4)


def test_a_header_longer_than_its_bound_is_corrupt_before_it_is_read() -> None:
    with pytest.raises(BadAdapter, match="corrupt_file"):
        read_header(io.BytesIO((1 << 40).to_bytes(8, "little")), 1 << 50, "f")


def test_a_git_lfs_pointer_says_so() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    with pytest.raises(BadAdapter, match="lfs_pointer"):
        _read(pointer)
