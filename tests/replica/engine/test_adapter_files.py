"""Folders and files that cannot be trusted, and neighbours that do not notice."""

from __future__ import annotations

import os
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
