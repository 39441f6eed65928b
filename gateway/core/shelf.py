"""A store that many replicas read from: what it lists is on disk for all that do not name it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState

_BOOTS_REMEMBERED = 8


@dataclass(slots=True)
class Holdings:
    boot: str = ""
    seq: int = -1
    retired: deque[str] = field(default_factory=lambda: deque(maxlen=_BOOTS_REMEMBERED))
    routable: dict[AdapterId, AdapterState] = field(default_factory=dict)
    reported: tuple[AdapterState, ...] = ()  # FAILED ones included
    loading_since: dict[AdapterId, float] = field(default_factory=dict)
    store: str = ""
    failed: frozenset[AdapterId] = frozenset()
    remembered: frozenset[AdapterId] = frozenset()  # of a lost replica
    remembered_store: str = ""


@dataclass(slots=True)
class Shelf:
    """A store that several replicas read from."""

    listing: dict[AdapterId, AdapterState] = field(default_factory=dict)
    members: dict[ReplicaId, Holdings] = field(default_factory=dict)


class Held(Mapping[ReplicaId, AdapterState]):
    """Who has an adapter of a shelf: those that name it as they say, the others on disk."""

    __slots__ = ("_adapter", "_named", "_shelf")

    def __init__(
        self, adapter: AdapterId, named: Mapping[ReplicaId, AdapterState], shelf: Shelf
    ) -> None:
        self._adapter = adapter
        self._named = named
        self._shelf = shelf

    def __getitem__(self, replica: ReplicaId) -> AdapterState:
        state = self.get(replica)
        if state is None:
            raise KeyError(replica)
        return state

    def get(self, replica: ReplicaId, default: object = None) -> AdapterState | None:  # type: ignore[override]
        state = self._named.get(replica)
        if state is None and (mine := self._shelf.members.get(replica)) is not None:
            return None if self._adapter in mine.failed else self._shelf.listing[self._adapter]
        return state

    def __contains__(self, replica: object) -> bool:
        return self.get(replica) is not None  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[ReplicaId]:
        yield from self._named
        for replica, mine in self._shelf.members.items():
            if replica not in self._named and self._adapter not in mine.failed:
                yield replica

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._named) or any(True for _ in self)
