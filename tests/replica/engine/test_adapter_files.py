"""Folders and files that cannot be trusted, and neighbours that do not notice."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from uploads import MAX_RANK, NAME, judge

from replica.engine.adapter_store import AdapterFolder, BadAdapter, Found, Refused
from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_adapter
from shared.ids import AdapterId


def _lfs(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / "adapter_model.safetensors").write_text(pointer)


def _only_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _pipe(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")


def _config_pipe(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def _to_a_device(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").symlink_to("/dev/zero")


def _socket(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    with socket.socket(socket.AF_UNIX) as end:
        at = os.open(folder, os.O_RDONLY)
        end.bind(f"/proc/self/fd/{at}/adapter_model.safetensors")
        os.close(at)


def _directory(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()


def _header(entries: dict[str, object], data: bytes = b"") -> Callable[[Path], object]:
    text = json.dumps(entries).encode()
    content = len(text).to_bytes(8, "little") + text + data
    return lambda folder: (folder / "adapter_model.safetensors").write_bytes(content)


def _entry(shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _linked_out(folder: Path) -> None:
    outside = folder.parent.parent / f"{folder.parent.name}-outside.safetensors"
    (folder / "adapter_model.safetensors").rename(outside)
    (folder / "adapter_model.safetensors").symlink_to(outside)


def _nested(folder: Path) -> None:
    (folder / "checkpoint-5").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).rename(folder / "checkpoint-5" / file)


BAD_FILES: list[tuple[str, Callable[[Path], object]]] = [
    ("missing_config", lambda folder: (folder / "adapter_config.json").unlink()),
    ("bad_config", lambda folder: (folder / "adapter_config.json").write_text("{not json")),
    ("bad_config", lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000)),
    ("bad_config", lambda folder: (folder / "adapter_config.json").write_bytes(b"\xff\xfe{")),
    ("bad_config", lambda folder: (folder / "adapter_config.json").write_text(" " * (1 << 21))),
    ("missing_weights", lambda folder: (folder / "adapter_model.safetensors").unlink()),
    ("pickle_not_allowed", _only_pickle),
    ("lfs_pointer", _lfs),
    ("corrupt_file", _truncate),
    ("corrupt_file", lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"abc")),
    ("corrupt_file", lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"")),
    ("not_a_file", _pipe),
    ("not_a_file", _config_pipe),
    ("not_a_file", _directory),
    ("not_a_file", _socket),
    ("outside_root", _to_a_device),
    # A header that promises more than the file has, or more than any machine has.
    ("corrupt_file", _header({Q: _entry([1 << 40, 1 << 40], 0, 1 << 82)})),
    ("corrupt_file", _header({Q: _entry([1 << 40, 1 << 40], 0, 0)})),
    ("corrupt_file", _header({Q: _entry([4, 64], 0, 1024)})),
    ("corrupt_file", _header({Q: _entry([-4, -64], 0, 1024)}, bytes(1024))),
    ("corrupt_file", _header({Q: _entry([10**30, 0], 0, 0)}, b"x")),
    ("corrupt_file", _header({Q: [[[]]]})),
    ("too_large", _header({f"{Q}{at}": _entry([0], 0, 0) for at in range(10_000)})),
    ("outside_root", _linked_out),
    ("ambiguous_layout", _nested),
]


@pytest.mark.parametrize(
    ("code", "spoil"), BAD_FILES, ids=[f"{code}-{i}" for i, (code, _) in enumerate(BAD_FILES)]
)
def test_files_that_cannot_be_trusted_are_refused(
    code: str, spoil: Callable[[Path], object], root: Path, config: ModelConfig
) -> None:
    spoil(root / NAME)
    verdict = judge(root, config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == code


def test_a_folder_linked_out_of_the_root_is_refused(
    root: Path, config: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (root / NAME).rename(outside / NAME)
    (root / "linked").symlink_to(outside / NAME)
    verdict = judge(root, config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == "outside_root"


@pytest.mark.parametrize("name", ["../good", "a/b", "", ".", "x" * 200, "good\n"])
def test_a_name_is_never_a_path(name: str, root: Path, config: ModelConfig) -> None:
    with pytest.raises(BadAdapter, match="bad_name"):
        AdapterFolder(root / "..", MAX_RANK, config).read(AdapterId(name))


def test_a_bad_adapter_does_not_hide_its_neighbours(root: Path, config: ModelConfig) -> None:
    for name in ("broken", "void", "zz"):
        tiny_adapter(root / name, config, seed=5)
    _truncate(root / "broken")
    (root / "void" / "adapter_config.json").unlink()
    (root / ".git").mkdir()
    (root / "README.md").write_text("")
    verdicts = AdapterFolder(root, MAX_RANK, config).scan()
    assert [verdict.adapter for verdict in verdicts] == ["broken", "good", "void", "zz"]
    assert [isinstance(verdict, Found) for verdict in verdicts] == [False, True, False, True]


def test_a_folder_replaced_while_it_is_read_is_one_or_the_other(
    root: Path, config: ModelConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two whole adapters change places as fast as they can; no read is a mixture of both."""
    aside = tmp_path_factory.mktemp("aside")
    tiny_adapter(aside / "other", config, seed=9, alpha=64)
    digests = {AdapterFolder(at, MAX_RANK, config).scan()[0].digest for at in (root, aside)}  # type: ignore[union-attr]
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            (root / NAME).rename(aside / "kept")
            (aside / "other").rename(root / NAME)
            (aside / "kept").rename(aside / "other")

    swapper = threading.Thread(target=swap)
    swapper.start()
    read, refused = set(), set()
    try:
        folder = AdapterFolder(root, MAX_RANK, config)
        for _ in range(300):
            try:
                read.add(folder.read(NAME).digest)
            except BadAdapter as bad:
                refused.add(bad.code)
    finally:
        done.set()
        swapper.join()
    assert read <= digests
    assert read, "some reads were not disturbed"
    assert refused <= {"changed", "missing_config", "missing_weights", "unreadable"}
