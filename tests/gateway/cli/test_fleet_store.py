"""The store of a fleet on this machine: its own, which is started again, or the user's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from gateway.cli.failure import Failure
from gateway.cli.fleet_store import OwnStore, reach
from gateway.cli.home import Home
from gateway.cli.process import Died
from gateway.config import StoreConfig


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.make()
    return home


@pytest.fixture
def own(home: Home) -> Iterator[OwnStore]:
    with ExitStack() as held:
        yield OwnStore(home, held)


def kill(home: Home) -> None:
    os.kill(int((home.store / "lock").read_text()), signal.SIGKILL)


async def test_it_starts_again_where_it_was_with_what_it_held(home: Home, own: OwnStore) -> None:
    url = own.url
    with redis.Redis.from_url(url) as client:
        client.set("k", "v")
    kill(home)
    async with asyncio.timeout(10):
        assert await own.exited() == -signal.SIGKILL
    await own.start_again()
    assert own.url == url
    with redis.Redis.from_url(url) as client:
        assert client.get("k") == b"v"


async def test_a_start_that_fails_has_ended_and_its_log_says_why(home: Home, own: OwnStore) -> None:
    kill(home)
    async with asyncio.timeout(10):
        await own.exited()
    (home.store / "appendonlydir" / "appendonly.aof.manifest").write_text("this is no manifest\n")
    with pytest.raises(Died, match="manifest"):
        await own.start_again()
    async with asyncio.timeout(10):
        assert await own.exited() != 0
    assert "manifest" in own.tail()


async def test_a_store_that_answers_is_reached(own: OwnStore) -> None:
    await reach(StoreConfig(url=own.url))


@pytest.mark.parametrize(
    "url", ["redis://me:hush@127.0.0.1:1/0", "redis://127.0.0.1:1?password=hush"]
)
async def test_a_store_that_does_not_is_named_without_its_password(url: str) -> None:
    with pytest.raises(Failure, match=r"^the store at redis://127.0.0.1:1.*remove store.url") as e:
        await reach(StoreConfig(url=url))
    assert "hush" not in str(e.value)
    assert "\n" not in str(e.value)


async def test_an_address_that_is_none_is_a_failure() -> None:
    with pytest.raises(Failure, match=r"store.url.*remove store.url"):
        await reach(StoreConfig(url="http://127.0.0.1:1"))
