"""The patient road's limit, and redis-py's exceptions as the store's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from redis.exceptions import RedisError, ResponseError

from gateway.store.wire import StoreAway, StoreError

PATIENCE_S: Final = 5.0
"""Limit of a change or a read."""


@asynccontextmanager
async def patient() -> AsyncIterator[None]:
    with translated():
        async with asyncio.timeout(PATIENCE_S):
            yield


@contextmanager
def translated() -> Iterator[None]:
    """redis-py's exceptions as ours."""
    try:
        yield
    except ResponseError as error:
        raise StoreError(str(error)) from error
    except TimeoutError as error:
        why = f"no answer within {PATIENCE_S:g} s; what was asked may have been done: look first"
        raise StoreAway(f"the store did not answer: {why}", sent=True) from error
    except (RedisError, OSError) as error:
        raise StoreAway(f"the store cannot be reached: {error!s}", sent=True) from error
