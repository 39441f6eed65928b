"""Who may have a team of threads: the thread that runs steps, and nobody else.

torch's operators on a CPU run on an OpenMP team of the thread that calls them. GNU OpenMP keeps a
team for every such thread, and as soon as all teams together are more threads than there are cores
their members no longer spin for their next share of work: they sleep at once, and each of the some
250 parallel parts of a step begins with waking them. SmolLM2-135M with 8 rows on two cores: 67 ms a
step with one team in the process, 101 ms with another one that does nothing.

So the base is read on a thread that ends, and its team with it (`apart`); threads that read
adapters have none (`lone`); and the one that runs steps takes its own (`team`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")


def team(threads: int) -> None:
    """Let the calling thread's operators run on so many threads."""
    torch.get_num_threads()  # a thread's first look takes over what another thread last set
    torch.set_num_threads(threads)


def lone() -> None:
    """Let them run on the calling thread alone; an initializer of executors."""
    team(1)


def apart(make: Callable[[], _T]) -> _T:
    """`make()` on a thread of its own, which then ends; raises what it raises."""
    with ThreadPoolExecutor(1, thread_name_prefix="apart") as thread:
        return thread.submit(make).result()
