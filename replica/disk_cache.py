"""DiskCache: adapters of an object store on the local disk, within a budget of bytes.

    <root>/adapters/<key>/     whole adapters: what is here is complete
    <root>/incoming/<key>/     on their way; a file of them is a download that may go on

A key names one version of one adapter's files. Laws: an adapter appears by one rename, so a crash
leaves it whole or not at all; whole and incoming bytes together stay within `max_bytes`; the least
recently used goes first, by times kept on the disk itself, so that a restart forgets nothing; what
is held is never removed. One process has a root at a time. Methods may be called from any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from replica.engine.bad_adapter import BadAdapter
from shared.ids import AdapterId


class CacheTaken(OSError):
    """Another process has this root."""


class DiskCache:
    def __init__(self, root: Path, *, max_bytes: int) -> None:
        """Raises CacheTaken, or OSError where the folder cannot be written."""
        self.max_bytes = max_bytes
        self.adapters, self._incoming = root / "adapters", root / "incoming"
        for folder in (self.adapters, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)
        self._claim = (root / "lock").open("a")
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._claim.close()
            raise CacheTaken(f"{root} is another replica's cache: give each its own") from None
        self._lock = threading.Lock()
        self._held: dict[AdapterId, int] = {}
        self._promised: dict[AdapterId, int] = {}  # bytes of what is on its way
        self._sizes = dict(sorted(self._found(), key=lambda item: self._used_at(item[0])))

    def close(self) -> None:
        self._claim.close()

    def __contains__(self, key: AdapterId) -> bool:
        return key in self._sizes  # without the lock, under which files are deleted

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used()

    @contextmanager
    def hold(self, key: AdapterId) -> Iterator[bool]:
        """Whether it is there; if so it stays until the end, as the most recently used."""
        with self._lock:
            there = key in self._sizes
            if there:
                self._sizes[key] = self._sizes.pop(key)
                self._held[key] = self._held.get(key, 0) + 1
        try:
            if there:
                with suppress(OSError):  # it decides only who goes first after a restart
                    os.utime(self.adapters / key)
            yield there
        finally:
            if there:
                self._let_go(key)

    def bring(self, key: AdapterId, size_bytes: int, fill: Callable[[Path], None]) -> None:
        """`fill` writes the files into the folder it is given, which may hold a part of them.

        Raises what it raises (its folder then stays, to go on from), BadAdapter `too_large` or
        `disk_full`.
        """
        with self._lock:
            if key in self._sizes:
                return
            self._make_room(key, size_bytes)
            self._promised[key] = size_bytes
        folder = self._incoming / key
        try:
            folder.mkdir(exist_ok=True)
            fill(folder)
            os.replace(folder, self.adapters / key)
            _sync(self.adapters)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise BadAdapter("unreadable", f"the adapter cache: {error}") from error
            _delete(folder)
            raise BadAdapter("disk_full", f"{error}: free space for the adapter cache") from error
        else:
            with self._lock:
                self._sizes[key] = size_bytes
        finally:
            with self._lock:
                del self._promised[key]

    def remove(self, key: AdapterId) -> None:
        """It is not what it should be, or nobody wants it any more; harmless when it is held."""
        with self._lock:
            if key not in self._held:
                self._sizes.pop(key, None)
                _delete(self.adapters / key)
                if key not in self._promised:
                    _delete(self._incoming / key)

    def check(self) -> None:
        with self._lock:
            assert self._used() <= self.max_bytes, "more bytes than the budget"
            assert self._held.keys() <= self._sizes.keys(), "held, but not there"
            assert {path.name for path in self.adapters.iterdir()} == set(self._sizes)

    def _used(self) -> int:
        return sum(self._sizes.values()) + sum(self._promised.values())

    def _let_go(self, key: AdapterId) -> None:
        with self._lock:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]

    def _make_room(self, key: AdapterId, size_bytes: int) -> None:
        fixed = sum(self._promised.values()) + sum(self._sizes[held] for held in self._held)
        if size_bytes > self.max_bytes:
            raise BadAdapter(
                "too_large", f"{size_bytes} bytes do not fit in a cache of {self.max_bytes}"
            )
        if fixed + size_bytes > self.max_bytes:
            raise BadAdapter("disk_full", "the adapter cache is full of adapters in use; try again")
        parts = [
            (part, _size(part))
            for part in sorted(self._incoming.iterdir())
            if part.name != key and part.name not in self._promised
        ]  # of downloads that may go on, but do not now
        over = self._used() + sum(size for _, size in parts) + size_bytes - self.max_bytes
        for part, size in parts:
            if over > 0:
                _delete(part)
                over -= size
        for victim in [other for other in self._sizes if other not in self._held]:
            if over > 0:
                over -= self._sizes.pop(victim)
                _delete(self.adapters / victim)

    def _found(self) -> Iterator[tuple[AdapterId, int]]:
        for folder in self.adapters.iterdir():
            yield AdapterId(folder.name), _size(folder)

    def _used_at(self, key: AdapterId) -> tuple[int, str]:
        return (self.adapters / key).stat().st_mtime_ns, key


def _delete(folder: Path) -> None:
    """What is open in it can still be read to its end."""
    shutil.rmtree(folder, ignore_errors=True)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
