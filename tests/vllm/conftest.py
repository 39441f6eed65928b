"""The servers of this folder: two real vLLMs, started once, together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from vllm_pool import PYTHON, Process, vllm


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def adapters(folder: Path, real_adapters: Path) -> Path:
    """A folder that every server sees."""
    copy = folder / "adapters"
    shutil.copytree(real_adapters, copy)
    return copy


@pytest.fixture(scope="session")
def servers(folder: Path, real_base: Path) -> Iterator[dict[str, Process]]:
    assert PYTHON.exists(), "its environment is made by `make test-vllm`"
    made = {name: vllm(name, real_base, folder) for name in ("v1", "v2")}
    with ExitStack() as stack:
        for server in made.values():
            stack.callback(server.kill)
            server.start()
        for server in made.values():
            server.ready()
        yield made
