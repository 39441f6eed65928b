"""The fleet that the tests of this folder share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from local_fleet import RunningFleet, eventually, running


@pytest.fixture(scope="session")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, real_base: Path, real_adapters: Path
) -> Iterator[RunningFleet]:
    """Two replicas with the real base and adapters, for all tests of this folder."""
    folder = tmp_path_factory.mktemp("fleet")
    adapters = folder / "adapters"
    shutil.copytree(real_adapters, adapters)
    with running(folder / "data", real_base, adapters, "--replicas", "2") as fleet:
        yield fleet


@pytest.fixture(scope="session")
def unlimited_key(fleet: RunningFleet) -> str:
    """Of a tenant that no quota stops: tests may be quicker than a minute's allowance."""
    fleet.cli("tenant", "create", "unlimited")
    secret: str = fleet.cli("tenant", "key-create", "unlimited", "--json")["secret"]
    headers = {"Authorization": f"Bearer {secret}"}
    eventually(lambda: httpx.get(f"{fleet.url}/v1/models", headers=headers).status_code == 200)
    return secret
