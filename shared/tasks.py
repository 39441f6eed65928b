"""The one place that starts background tasks: it keeps the reference and reports the crash.

asyncio holds tasks weakly and swallows their exceptions until collection; a watcher that died
without a word is the fault this prevents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

_log = logging.getLogger(__name__)
_running: set[asyncio.Task[Any]] = set()


def spawn(work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
    """Run `work` on the current loop; a crash is logged with its name."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_finished)
    return task


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait; what the tasks raise was already reported."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("task crashed", exc_info=error, extra={"task": task.get_name()})
