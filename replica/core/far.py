"""Far: versions that are on no disk of this machine, and which of them are being fetched.

Law: a version that is far takes no slot; it is asked for once, however many wait for it, until a
copy is in host memory or the fetch has failed.
"""

from __future__ import annotations

from replica.core.commands import Command, Fetch
from replica.core.host_tier import HostTier, Version


class Far:
    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._asked: dict[Version, bool] = {}

    def add(self, version: Version) -> None:
        self._asked.setdefault(version, False)

    def discard(self, version: Version) -> None:
        """It is here, or nobody wants it any more."""
        self._asked.pop(version, None)

    def holds_back(self, version: Version, outbox: list[Command]) -> bool:
        """Whether its load has to wait for a fetch, which is asked for if it was not."""
        asked = self._asked.get(version)
        if asked is None or version in self._host:
            return False
        if not asked:
            self._asked[version] = True
            outbox.append(Fetch(*version))
        return True
