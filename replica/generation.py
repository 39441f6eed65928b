"""Generation: the asyncio half of one request, from admission to the end of its last sequence.

Law: leaving its `with` ends every sequence that still runs, wherever it is (queue, load, prefill,
decode), and does so once. So a client that goes, an error and a stop string need no path of
their own. What a step brought is handed over whole: one wake-up a step, however many sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from replica.core.sequence import Finish
from replica.engine.sampler import Drawn
from replica.errors import ReplicaError


@dataclass(frozen=True, slots=True)
class PromptScores:
    """A stretch of a prompt, scored: the tokens from position `start + 1` on."""

    start: int
    tokens: tuple[Drawn, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """What one step brought one sequence: a token, an end, both, or scores of its prompt."""

    seq: str
    token: int | None = None
    finish: Finish | None = None
    digest: str = ""  # version of the adapter it runs with; on its first token only
    cached: int = 0  # tokens of its prompt that were not computed again; likewise
    error: ReplicaError | None = None  # with Finish.ERROR
    drawn: Drawn | None = None  # the token's log-probabilities, if its request wants them
    prompt: PromptScores | None = None  # nothing else is in such an event, but the digest


class Generation:
    """Events in by `push`, out by `next`. Bounded by the `max_tokens` of its sequences."""

    __slots__ = ("_abort", "_closed", "_error", "_events", "_ids", "_news", "_open")

    def __init__(
        self,
        seq_ids: Sequence[str],
        *,
        abort: Callable[[str], None],
        closed: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._ids = tuple(seq_ids)
        self._open = set(seq_ids)
        self._abort = abort
        self._closed = closed
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._error: ReplicaError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for seq_id in sorted(self._open):
            self.stop(seq_id)
        self._closed(self._ids)

    @property
    def open(self) -> bool:
        """Whether a sequence may still bring something."""
        return bool(self._open or self._events)

    def stop(self, seq_id: str) -> None:
        """This sequence is to bring nothing more."""
        if seq_id in self._open:
            self._open.remove(seq_id)
            self._abort(seq_id)

    def push(self, event: Event) -> None:
        if event.seq in self._open:
            if event.finish is not None:
                self._open.remove(event.seq)
            self._events.append(event)
            self._news.set()

    def fail(self, error: ReplicaError) -> None:
        """The request cannot go on; `next` raises it after what came before."""
        self._error = error
        self._news.set()

    async def next(self, timeout_s: float) -> list[Event]:
        """All events since the last call; none when `timeout_s` passed without any.

        Raises the error of the first sequence that failed.
        """
        if not self._events and self._error is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise self._error
        for event in events:
            if event.error is not None:
                raise event.error
        return events
