"""HostTier: which adapter versions have a copy in host memory.

Law: never more than `places` copies, those on their way included. A copy that a load reads from is
busy and stays; among the others the least recently used goes first. What had to go is returned, so
that whoever owns the memory can let go of it.
"""

from __future__ import annotations

from shared.ids import AdapterId

Version = tuple[AdapterId, str]
"""An adapter's name and the digest of its content: what the weights belong to."""


class HostTier:
    def __init__(self, *, places: int) -> None:
        self.places = places
        self._copies: dict[Version, bool] = {}  # least recently used first; True: it has arrived
        self._busy: set[Version] = set()

    def __contains__(self, version: Version) -> bool:
        """Whether the copy is there, not only on its way."""
        return self._copies.get(version, False)

    def __len__(self) -> int:
        return len(self._copies)

    def reserve(self, version: Version) -> list[Version]:
        """Keep a place for a load until `settle`; there is always one while loads < places."""
        gone = self._make_room(version)
        self._copies.setdefault(version, False)
        self._busy.add(version)
        self.touch(version)
        return gone

    def settle(self, version: Version) -> None:
        """The load ended well: the copy is there and may go when its turn comes."""
        self._busy.discard(version)
        self._copies[version] = True

    def arrive(self, version: Version) -> list[Version]:
        """A copy is in memory. When all others are busy, the newcomer itself has to go."""
        if version not in self._copies and len(self._busy) == self.places:
            return [version]
        gone = self._make_room(version)
        self._copies[version] = True
        self.touch(version)
        return gone

    def is_busy(self, version: Version) -> bool:
        return version in self._busy

    def versions(self) -> tuple[Version, ...]:
        return tuple(self._copies)

    def touch(self, version: Version) -> None:
        if version in self._copies:
            self._copies[version] = self._copies.pop(version)

    def drop(self, version: Version) -> list[Version]:
        """Forget it, busy or not; returns it when there was a copy in memory."""
        self._busy.discard(version)
        return [version] if self._copies.pop(version, False) else []

    def check(self) -> None:
        assert len(self._copies) <= self.places, "more copies than places"
        assert self._busy <= self._copies.keys(), "busy without a place"

    def _make_room(self, version: Version) -> list[Version]:
        if version in self._copies or len(self._copies) < self.places:
            return []
        victim = next(copy for copy in self._copies if copy not in self._busy)
        return self.drop(victim)
