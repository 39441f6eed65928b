"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
from scripted import ScriptedReplica, fleet_of


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], Any]]:
    """The loop that the product runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def fleet(valkey_url: str, tmp_path: Path) -> Callable[..., Any]:
    """`async with fleet(replica, …, section={…}) as it:` starts a gateway on them."""

    def start(*replicas: ScriptedReplica, **options: Any) -> Any:
        return fleet_of(*replicas, store=valkey_url, spool=tmp_path, **options)

    return start
