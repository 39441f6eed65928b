"""WaitingLine: who is not running, in the order of arrival.

Law: one line an adapter and one for the base, each first come first served; between lines the
older head goes first. Those that were preempted stand before all: they hold a slot, and whatever
came before them runs already. An adapter's line may be passed over, a sequence within it may not.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from replica.core.live import Live
from shared.ids import AdapterId


class WaitingLine:
    def __init__(self) -> None:
        self._preempted: list[Live] = []
        self._lines: dict[AdapterId | None, deque[Live]] = {}

    def __iter__(self) -> Iterator[Live]:
        yield from self._preempted
        for line in self._lines.values():
            yield from line

    @property
    def preempted(self) -> tuple[Live, ...]:
        return tuple(self._preempted)

    def adapters(self) -> list[AdapterId | None]:
        """Whose lines are not empty; None is the base."""
        return list(self._lines)

    def push(self, entry: Live) -> None:
        self._lines.setdefault(entry.seq.adapter, deque()).append(entry)

    def push_front(self, entry: Live) -> None:
        """It was preempted."""
        insort(self._preempted, entry, key=_order)

    def remove(self, entry: Live) -> None:
        if entry.admitted:
            self._preempted.remove(entry)
            return
        line = self._lines[entry.seq.adapter]
        if line[0] is entry:
            line.popleft()
        else:
            line.remove(entry)
        if not line:
            del self._lines[entry.seq.adapter]

    def clear(self, adapter: AdapterId) -> list[Live]:
        """Empty the line of one adapter; those that it held."""
        return list(self._lines.pop(adapter, ()))

    def candidates(self, may_start: Callable[[Live], bool]) -> Iterator[Live]:
        """Who could start, oldest first. Whoever is yielded leaves before the next is asked for."""
        while self._preempted:
            yield self._preempted[0]
        heads = [(line[0].order, adapter) for adapter, line in self._lines.items()]
        heapify(heads)
        while heads:
            _, adapter = heappop(heads)
            head = self._lines[adapter][0]
            if may_start(head):
                yield head
                if adapter in self._lines:
                    heappush(heads, (self._lines[adapter][0].order, adapter))

    def check(self) -> None:
        for adapter, line in self._lines.items():
            assert line, f"an empty line stays: {adapter!r}"
            for entry in line:
                assert entry.seq.adapter == adapter, "in the line of another adapter"
                assert not entry.admitted, "started, but in line as if new"
        for entries in (self._preempted, *self._lines.values()):
            orders = [entry.order for entry in entries]
            assert orders == sorted(orders), "a line is out of order"
        assert all(entry.admitted for entry in self._preempted), "preempted, but never started"


def _order(entry: Live) -> int:
    return entry.order
