"""Catalogue: the adapters that the store has, and which version of each a new sequence gets.

Law: a name has one current version, or none because it FAILED; a version that was replaced never
becomes current again unless the store offers it again. Pins belong to the name and outlive its
versions; one slot stays free of them, and so many pages that every adapter still fits beside them.
What does not fit when it is offered FAILED, with what would help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from replica.core.host_tier import Version
from shared.ids import AdapterId


@dataclass(slots=True)
class Known:
    digest: str  # "" when validation refused the content before it had one
    rank: int = 0
    size_bytes: int = 0
    pages: int = 0
    pinned: bool = False
    failed: bool = False
    reason: str = ""


class Catalogue:
    """What replaces a version returns the old one: it has to leave slots and host memory."""

    def __init__(self, *, pins_max: int, pages_max: int) -> None:
        self._pins_max = pins_max
        self._pages_max = pages_max
        self._known: dict[AdapterId, Known] = {}

    def __iter__(self) -> Iterator[tuple[AdapterId, Known]]:
        return iter(sorted(self._known.items(), key=lambda item: item[0]))

    def offer(
        self, adapter: AdapterId, digest: str, rank: int, size_bytes: int, pages: int
    ) -> Version | None:
        if not digest:
            raise ValueError(f"adapter {adapter!r} needs the digest of its content")
        old = self._known.get(adapter)
        if old is not None and old.digest == digest:
            return None
        new = Known(digest, rank, size_bytes, pages)
        left = self._pages_max - self._pinned_pages(without=adapter)
        if old is not None and old.pinned:
            left -= self._largest(without=adapter)
        if pages > left:
            new.failed = True
            new.reason = (
                f"it takes {pages} pages and adapters have {left} of {self._pages_max}; unpin "
                "others, or raise pages or lower max_model_len"
            )
        return self._replace(adapter, new)

    def refuse(self, adapter: AdapterId, reason: str) -> Version | None:
        return self._replace(adapter, Known("", failed=True, reason=reason))

    def withdraw(self, adapter: AdapterId) -> Version | None:
        old = self._known.pop(adapter, None)
        return None if old is None or not old.digest else (adapter, old.digest)

    def fail(self, version: Version, reason: str) -> None:
        """Its load failed; no matter to a newer version of the same name."""
        if self.is_current(version):
            known = self._known[version[0]]
            known.failed, known.reason = True, reason

    def pin(self, adapter: AdapterId, on: bool) -> None:
        known = self._known.get(adapter)
        if known is None:
            raise ValueError(f"adapter {adapter!r} is not in this replica's store: add it first")
        pins = sum(other.pinned for other in self._known.values() if other is not known)
        if on and pins >= self._pins_max:
            raise ValueError(
                f"cannot pin {adapter!r}: {pins} adapters are pinned and one slot must stay for "
                "all others; unpin one first, or raise max_loras"
            )
        own = 0 if known.failed else known.pages
        left = self._pages_max - self._pinned_pages(without=adapter) - own
        if on and left < self._largest(without=adapter):
            raise ValueError(
                f"cannot pin {adapter!r}: the {left} pages left would not do for every other "
                "adapter; unpin one first, or raise pages"
            )
        known.pinned = on

    def current(self, adapter: AdapterId) -> Version | None:
        """What a new sequence of this adapter would run on; None when it cannot run."""
        known = self._known.get(adapter)
        return None if known is None or known.failed else (adapter, known.digest)

    def is_current(self, version: Version) -> bool:
        return self.current(version[0]) == version

    def is_pinned(self, version: Version) -> bool:
        return self.is_current(version) and self._known[version[0]].pinned

    def pinned(self) -> list[AdapterId]:
        return [adapter for adapter, known in self if known.pinned]

    def pages(self, version: Version) -> int:
        """Of a current version."""
        assert self.is_current(version)
        return self._known[version[0]].pages

    def size_bytes(self, version: Version) -> int:
        """0 for a version that is not current."""
        return self._known[version[0]].size_bytes if self.is_current(version) else 0

    def refusal(self, adapter: AdapterId) -> str | None:
        """Why it cannot run; None when it can."""
        known = self._known.get(adapter)
        if known is None:
            return f"adapter {adapter!r} is not, or no longer, in this replica's store"
        return f"adapter {adapter!r} failed: {known.reason}" if known.failed else None

    def check(self) -> None:
        assert len(self.pinned()) <= self._pins_max, "more pins than slots may be pinned"
        for adapter, known in self._known.items():
            room = self._pages_max - self._pinned_pages(without=adapter)
            assert known.failed or known.pages <= room, f"{adapter!r} can never be loaded"
        for adapter, known in self._known.items():
            assert known.digest or known.failed, f"{adapter!r} has neither content nor a fault"

    def _pinned_pages(self, *, without: AdapterId) -> int:
        return sum(
            known.pages
            for adapter, known in self._known.items()
            if known.pinned and not known.failed and adapter != without
        )

    def _largest(self, *, without: AdapterId) -> int:
        sizes = (
            known.pages
            for adapter, known in self._known.items()
            if not known.failed and not known.pinned and adapter != without
        )
        return max(sizes, default=0)

    def _replace(self, adapter: AdapterId, new: Known) -> Version | None:
        old = self._known.get(adapter)
        self._known[adapter] = new
        if old is None:
            return None
        new.pinned = old.pinned
        return (adapter, old.digest) if old.digest else None
