"""Source: where a replica's adapters are read from, a folder or an object store behind a cache.

Names are those of the folders directly below its root. What may block says so, and is called on
threads that may wait: `fetch`, and `read` of what is not at hand, wait for another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Protocol

from replica.engine.adapter_store import AdapterFolder, Found, Refused
from replica.engine.bad_adapter import BadAdapter
from replica.engine.host_adapter import HostAdapter
from shared.ids import AdapterId

NOT_FOUND: Final = "adapter_not_found"

PASSING: Final = frozenset({"unreachable", "unreadable", "changed", "disk_full"})
"""Codes that accuse the store, the disk or the moment, not the adapter: it may be read later."""


class Source(Protocol):
    def scan(self) -> Iterable[Found | Refused]:
        """What is known of every adapter. Blocks for the local disk only."""
        ...

    def locate(self, path: str) -> AdapterId:
        """The adapter that a load call's path names. Raises BadAdapter `outside_root` or NOT_FOUND;
        nothing outside the root is looked at."""
        ...

    def at_hand(self, adapter: AdapterId) -> bool:
        """Whether reading it needs this machine only."""
        ...

    def fetch(self, adapter: AdapterId) -> None:
        """Bring it to this machine. Blocks; raises BadAdapter."""
        ...

    def read(self, adapter: AdapterId) -> HostAdapter:
        """Blocks; raises BadAdapter."""
        ...

    def close(self) -> None: ...


class LocalSource:
    """A folder on this machine."""

    def __init__(self, root: Path, folder: AdapterFolder) -> None:
        self._root = root.resolve()
        self._folder = folder
        self.scan = folder.scan
        self.read = folder.read

    def locate(self, path: str) -> AdapterId:
        missing = BadAdapter(
            NOT_FOUND,
            f"No adapter found for {path}; adapters are folders directly below the adapter store",
            "lora_path",
        )
        try:
            found = (self._root / path).resolve()
            is_folder = found.is_dir()
        except (OSError, ValueError):  # no name that a file system takes
            raise missing from None
        if not found.is_relative_to(self._root):
            raise BadAdapter(
                "outside_root", f"{path} leads out of this replica's adapter store", "lora_path"
            )
        if not is_folder or found.parent != self._root:
            raise missing
        return AdapterId(found.name)

    def at_hand(self, adapter: AdapterId) -> bool:
        return True

    def fetch(self, adapter: AdapterId) -> None:
        """It is here."""

    def close(self) -> None:
        """Nothing is held."""


class CopiedFrom:
    """A source with another `read`: its adapters then lie where the device copies from."""

    def __init__(self, source: Source, read: Callable[[AdapterId], HostAdapter]) -> None:
        self.scan = source.scan
        self.locate = source.locate
        self.at_hand = source.at_hand
        self.fetch = source.fetch
        self.close = source.close
        self.read = read
