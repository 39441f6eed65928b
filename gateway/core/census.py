"""Who belongs to the fleet, by what several sources name: the file, DNS, those that joined.

    named, unknown           -> Join        named with another address, and silent -> Move
    not named, and heard     -> stays: its report stream is the truth, a source may be wrong
    not named, and gone      -> Leave at once when its last word was that it drains, else after
                                it was both for `forget_s` on end

A source that could not be asked tells nothing, and what it named before stands. An address is
followed only when the old one is silent, so no answer of a source ever cuts a stream. Of sources
that name one replica the first in `order` counts. At most `members_max` belong; who came first
stays, and the rest wait in `crowded`.

Ring points hang on names, so a replica that is named again under its name has moved no adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeVar

from shared.ids import ReplicaId

E = TypeVar("E")
"""What a source tells of a replica: compared, never looked into."""


class Life(StrEnum):
    """What its own words say of a replica."""

    HEARD = "heard"
    SILENT = "silent"  # lost, or not heard yet
    DRAINED = "drained"  # lost, after it had said that it drains


@dataclass(frozen=True, slots=True)
class Join(Generic[E]):
    replica: ReplicaId
    entry: E


@dataclass(frozen=True, slots=True)
class Move(Generic[E]):
    """It is elsewhere now: its place in the ring stays."""

    replica: ReplicaId
    entry: E


@dataclass(frozen=True, slots=True)
class Leave:
    replica: ReplicaId


@dataclass(slots=True)
class _Member(Generic[E]):
    entry: E
    missing_since: float | None = None  # neither named nor heard


class Census(Generic[E]):
    def __init__(self, *, order: Sequence[str], members_max: int, forget_s: float) -> None:
        self._named: dict[str, Mapping[ReplicaId, E]] = {source: {} for source in order}
        self._members_max = members_max
        self._forget_s = forget_s
        self._members: dict[ReplicaId, _Member[E]] = {}
        self.crowded: Final[set[ReplicaId]] = set()
        """Named, and not taken in, because the fleet has as many as it may."""

    def told(self, source: str, named: Mapping[ReplicaId, E]) -> None:
        """All that this source names now."""
        assert source in self._named, f"{source} is no source"
        self._named[source] = dict(named)

    def settle(
        self, life: Callable[[ReplicaId], Life], now: float
    ) -> list[Join[E] | Move[E] | Leave]:
        """What is to change; it counts as done. Those that leave come first."""
        wanted = self._wanted()
        changes: list[Join[E] | Move[E] | Leave] = []
        for replica, member in list(self._members.items()):
            if (entry := wanted.get(replica)) is not None:
                member.missing_since = None
                if entry != member.entry and life(replica) is not Life.HEARD:
                    member.entry = entry
                    changes.append(Move(replica, entry))
            elif self._forgotten(member, life(replica), now):
                del self._members[replica]
                changes.insert(0, Leave(replica))
        self.crowded.clear()
        for replica in sorted(wanted.keys() - self._members.keys()):
            if len(self._members) < self._members_max:
                self._members[replica] = _Member(wanted[replica])
                changes.append(Join(replica, wanted[replica]))
            else:
                self.crowded.add(replica)
        return changes

    def holder(self, replica: ReplicaId) -> str | None:
        """The source that counts for it; None when none names it."""
        return next((source for source, named in self._named.items() if replica in named), None)

    @property
    def members(self) -> Mapping[ReplicaId, E]:
        return {replica: member.entry for replica, member in self._members.items()}

    def check(self) -> None:
        assert len(self._members) <= self._members_max
        assert not self.crowded & self._members.keys()
        wanted = self._wanted()
        assert all(r in self._members or r in self.crowded for r in wanted)
        for replica, member in self._members.items():
            assert replica not in wanted or member.missing_since is None

    def _wanted(self) -> dict[ReplicaId, E]:
        wanted: dict[ReplicaId, E] = {}
        for named in self._named.values():
            for replica, entry in named.items():
                wanted.setdefault(replica, entry)
        return wanted

    def _forgotten(self, member: _Member[E], life: Life, now: float) -> bool:
        if life is Life.HEARD:
            member.missing_since = None
            return False
        if member.missing_since is None:
            member.missing_since = now
        return life is Life.DRAINED or now - member.missing_since >= self._forget_s
