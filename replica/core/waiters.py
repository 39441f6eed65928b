"""Waiters: which sequences wait for which adapter, and since when.

Law: a sequence waits for at most one adapter, once; an adapter is as old as its oldest waiter.
"""

from __future__ import annotations

from shared.ids import AdapterId


class Waiters:
    def __init__(self) -> None:
        self._adapters: dict[str, AdapterId] = {}
        self._since: dict[AdapterId, dict[str, float]] = {}  # in order of arrival

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._adapters

    def add(self, seq_id: str, adapter: AdapterId, now: float) -> bool:
        """False when it waits already."""
        if seq_id in self._adapters:
            return False
        self._adapters[seq_id] = adapter
        self._since.setdefault(adapter, {})[seq_id] = now
        return True

    def remove(self, seq_id: str) -> bool:
        """False when it does not wait."""
        adapter = self._adapters.pop(seq_id, None)
        if adapter is None:
            return False
        since = self._since[adapter]
        del since[seq_id]
        if not since:
            del self._since[adapter]
        return True

    def adapters(self) -> list[AdapterId]:
        return list(self._since)

    def oldest_first(self) -> list[tuple[AdapterId, float]]:
        """Adapters with the time their oldest waiter came; ties by adapter."""
        oldest = [(next(iter(seqs.values())), adapter) for adapter, seqs in self._since.items()]
        return [(adapter, since) for since, adapter in sorted(oldest)]

    def check(self) -> None:
        listed = {seq: adapter for adapter, seqs in self._since.items() for seq in seqs}
        assert listed == self._adapters, "the two indexes of waiters differ"
        assert all(self._since.values()), "an adapter without waiters is listed"
