"""A turn on a real Valkey: one has it, others do not, and nobody keeps it by dying."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from scripted import until

from gateway.state.turns import Turn
from gateway.store.redis import Store


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    made = Store(valkey_url, prefix=f"t{uuid4().hex}:", timeout_s=2)
    await made.start()
    yield made
    await made.close()


async def test_one_has_it_until_it_lets_go(store: Store) -> None:
    one, two, other = Turn(store, "a"), Turn(store, "a"), Turn(store, "b")
    assert [await turn.mine() for turn in (one, two, one, other)] == [True, False, True, True]
    two.let_go()
    assert not await two.mine(), "it was not its own to give"
    one.let_go()
    assert await two.mine()
    assert not await one.mine()


async def test_one_that_asks_on_keeps_it_and_one_that_is_killed_loses_it(store: Store) -> None:
    one, two = Turn(store, "a", life_s=0.4), Turn(store, "a", life_s=0.4)
    for _ in range(8):
        assert await one.mine()
        await asyncio.sleep(0.1)
        assert not await two.mine()
    await asyncio.sleep(0.5)
    assert await two.mine()
    one.let_go()
    assert await two.mine()


async def test_while_the_store_is_away_everybody_has_it(store: Store) -> None:
    one, two = Turn(store, "a"), Turn(store, "a")
    assert await one.mine()
    await store.close()
    await until(lambda: store.away)
    assert await one.mine()
    assert await two.mine()
