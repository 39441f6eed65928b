"""HostTier: which adapter versions have a copy in host memory.

Laws: never more than `max_bytes` of copies, nor more than `places` of them, those on their way
included; two names with one content are two copies in one place, whose bytes count once. A copy
that a load reads from is busy and stays. Among the others the one whose loss costs least leaves
first: GreedyDual-Size (Cao and Irani, 1997). A copy's credit is

    H = L + reload_s / size_bytes    when it arrives and whenever it is used,

the one with the least H leaves, and L rises to that H. So a byte from a slow store outlives
a byte from the local disk, but not for ever: what nobody uses is overtaken. With equal costs a byte
this is plain LRU; ties go to the least recently used. What had to go is returned, so that whoever
owns the memory can let go of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shared.ids import AdapterId

Version = tuple[AdapterId, str]
"""An adapter's name and the digest of its content: what the weights belong to."""


@dataclass(slots=True)
class _Copy:
    size_bytes: int
    credit: float  # H
    per_byte_s: float = 0.0  # what a byte of it costs to bring again
    arrived: bool = False


class HostTier:
    """None: that limit is not set."""

    def __init__(self, *, places: int | None = None, max_bytes: int | None = None) -> None:
        self.places = places
        self.max_bytes = max_bytes
        self._copies: dict[Version, _Copy] = {}  # least recently used first
        self._busy: set[Version] = set()
        self._floor = 0.0  # L
        self._shared: Counter[str] = Counter()  # copies by digest
        self._bytes = 0

    def __contains__(self, version: Version) -> bool:
        """Whether the copy is there, not only on its way."""
        copy = self._copies.get(version)
        return copy is not None and copy.arrived

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def used_bytes(self) -> int:
        return self._bytes

    def has_room(self, version: Version, size_bytes: int = 0) -> bool:
        """Whether `reserve` would find a place now, at the cost of copies that are not busy."""
        if version in self._copies:
            return True
        busy = {copy[1]: self._copies[copy].size_bytes for copy in self._busy}
        busy[version[1]] = size_bytes
        return (self.places is None or len(self._busy) < self.places) and (
            self.max_bytes is None or sum(busy.values()) <= self.max_bytes
        )

    def reserve(self, version: Version, size_bytes: int = 0) -> list[Version]:
        """Keep a place for a load until `settle`; `has_room` has said that there is one."""
        gone = self._make_room(version, size_bytes)
        self._put(version, size_bytes)
        self._busy.add(version)
        self.touch(version)
        return gone

    def settle(self, version: Version) -> None:
        """The load ended well: the copy is there and may go when its turn comes."""
        self._busy.discard(version)
        self._copies[version].arrived = True

    def arrive(self, version: Version, size_bytes: int = 0, reload_s: float = 0.0) -> list[Version]:
        """A copy is in memory; it took `reload_s`, or as long as it did before where that is 0.
        Without room the newcomer itself has to go."""
        if not self.has_room(version, size_bytes):
            return [version]
        gone = self._make_room(version, size_bytes)
        copy = self._put(version, size_bytes)
        copy.arrived = True
        if reload_s and copy.size_bytes:
            copy.per_byte_s = reload_s / copy.size_bytes
        self.touch(version)
        return gone

    def is_busy(self, version: Version) -> bool:
        return version in self._busy

    def versions(self) -> tuple[Version, ...]:
        return tuple(self._copies)

    def touch(self, version: Version) -> None:
        copy = self._copies.pop(version, None)
        if copy is not None:
            copy.credit = self._floor + copy.per_byte_s
            self._copies[version] = copy

    def drop(self, version: Version) -> list[Version]:
        """Forget it, busy or not; returns it when there was a copy in memory."""
        self._busy.discard(version)
        copy = self._copies.pop(version, None)
        if copy is None:
            return []
        self._shared[version[1]] -= 1
        if not self._shared[version[1]]:
            del self._shared[version[1]]
            self._bytes -= copy.size_bytes
        return [version] if copy.arrived else []

    def check(self) -> None:
        assert self.places is None or len(self._copies) <= self.places, "more copies than places"
        assert self.max_bytes is None or self._bytes <= self.max_bytes, "more bytes than the budget"
        sizes = {version[1]: copy.size_bytes for version, copy in self._copies.items()}
        assert self._bytes == sum(sizes.values()), "bytes that nobody has, or that count twice"
        assert self._busy <= self._copies.keys(), "busy without a place"

    def _put(self, version: Version, size_bytes: int) -> _Copy:
        copy = self._copies.get(version)
        if copy is None:
            copy = self._copies[version] = _Copy(size_bytes, self._floor)
            if not self._shared[version[1]]:
                self._bytes += size_bytes
            self._shared[version[1]] += 1
        return copy

    def _make_room(self, version: Version, size_bytes: int) -> list[Version]:
        gone: list[Version] = []
        while version not in self._copies and not self._fits(version, size_bytes):
            idle = (copy for copy in self._copies if copy not in self._busy)
            victim = min(idle, key=lambda copy: self._copies[copy].credit)
            self._floor = self._copies[victim].credit
            gone += self.drop(victim)
        return gone

    def _fits(self, version: Version, size_bytes: int) -> bool:
        more = 0 if self._shared[version[1]] else size_bytes
        return (self.places is None or len(self._copies) < self.places) and (
            self.max_bytes is None or self._bytes + more <= self.max_bytes
        )
