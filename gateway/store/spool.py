"""A queue of lines on disk, for what must outlive this process and the store's absence.

The file is one header line that says how far it was read, then the lines, oldest first. A line is
in the page cache when `append` returns, so a killed process loses none; `sync` makes it survive a
power cut as well. What was read is given up by `commit`: a crash in between reads it again, so
whoever takes the lines must know them when they come twice.

One process owns a spool, by a lock on the file. Several gateways may be given one path: the next
takes `path.1`, and so on; `orphans` are spools that nobody holds any more and that still have
lines: a killed gateway's, which any other may finish.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Final

_HEADER: Final = b"%020d\n"
_HEADER_BYTES: Final = 21
_READ_BYTES: Final = 128 << 10
_COMPACT_BYTES: Final = 1 << 20
_SIBLINGS_MAX: Final = 64
BYTES_MAX: Final = 1 << 30
LINE_BYTES_MAX: Final = 32 << 10


class SpoolFull(OSError):
    """The spool has reached its bound."""


class Spool:
    """`append`, `peek`, `commit`, `sync`; raises OSError as the file system does."""

    def __init__(self, path: Path, *, bytes_max: int = BYTES_MAX) -> None:
        """Take `path` for this process; BlockingIOError when another process holds it."""
        self.path = path
        self._bytes_max = bytes_max
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _locked(path)
        size = os.fstat(self._file).st_size
        header = os.pread(self._file, _HEADER_BYTES, 0)
        self._read = max(_HEADER_BYTES, int(header) if header.rstrip(b"\n").isdigit() else 0)
        self._end = max(self._read, _end_of_lines(self._file, size))
        if self._end == self._read:
            self._reset()

    @classmethod
    def first_free(cls, path: Path) -> Spool:
        """The spool at `path`, or at the first of its siblings that no other process holds."""
        for sibling in _siblings(path):
            try:
                return cls(sibling)
            except BlockingIOError:
                continue
        raise OSError(errno.EUSERS, f"{_SIBLINGS_MAX} processes use the spool; give each its own")

    @classmethod
    def orphans(cls, path: Path) -> list[Spool]:
        """Siblings with lines in them that no process holds."""
        found = []
        for sibling in _siblings(path):
            try:
                if sibling.exists() and sibling.stat().st_size > _HEADER_BYTES:
                    spool = cls(sibling)
                    found.append(spool) if spool.waiting_bytes else spool.close()
            except BlockingIOError:
                continue
        return found

    @property
    def waiting_bytes(self) -> int:
        """What was appended and not committed."""
        return self._end - self._read

    def append(self, *lines: bytes) -> None:
        """Put lines, without their newlines, at the end; all or none."""
        longest = max(map(len, lines))
        if longest > LINE_BYTES_MAX:
            raise SpoolFull(errno.EFBIG, f"a line of {longest} bytes")
        data = b"\n".join(lines) + b"\n"
        if self._end + len(data) > self._bytes_max:
            raise SpoolFull(errno.ENOSPC, f"{self.path} holds its {self._bytes_max} bytes")
        # Never O_APPEND: pwrite would ignore the offset, and the header could not be rewritten.
        if os.pwrite(self._file, data, self._end) != len(data):  # the disk filled half way: the
            raise SpoolFull(errno.ENOSPC, f"no room for {self.path}")  # next lines overwrite it
        self._end += len(data)

    def peek(self, lines_max: int) -> list[bytes]:
        """The oldest lines, without their newlines; [] when there is none."""
        size = min(_READ_BYTES, self.waiting_bytes)
        data = os.pread(self._file, size, self._read)
        return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1][:lines_max]

    def commit(self, lines: list[bytes]) -> None:
        """These, just peeked, are done with."""
        self._read += sum(map(len, lines)) + len(lines)
        if self._read == self._end:
            self._reset()
        elif self._read > _COMPACT_BYTES and self.waiting_bytes < _COMPACT_BYTES:
            self._compact()
        else:
            os.pwrite(self._file, _HEADER % self._read, 0)

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _reset(self) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, _HEADER % _HEADER_BYTES, 0)
        self._read = self._end = _HEADER_BYTES

    def _compact(self) -> None:
        """Under steady traffic the queue is never empty: drop the part that was read."""
        rest = os.pread(self._file, self.waiting_bytes, self._read)
        fresh = self.path.with_name(self.path.name + ".new")
        file = _locked(fresh)
        try:
            os.ftruncate(file, 0)
            whole = _HEADER % _HEADER_BYTES + rest
            if os.pwrite(file, whole, 0) != len(whole):
                raise SpoolFull(errno.ENOSPC, f"no room for {fresh}")
            fresh.rename(self.path)
        except OSError:
            os.close(file)
            os.pwrite(self._file, _HEADER % self._read, 0)
            return  # it grows on; the next commit tries again
        os.close(self._file)
        self._file, self._read, self._end = file, _HEADER_BYTES, _HEADER_BYTES + len(rest)


def _locked(path: Path) -> int:
    """Open and lock; a file that was renamed away between the two is not the one we want."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_ino == path.stat().st_ino:
                return file
        except FileNotFoundError:
            pass
        except OSError:
            os.close(file)
            raise
        os.close(file)


def _siblings(path: Path) -> list[Path]:
    return [path, *[path.with_name(f"{path.name}.{n}") for n in range(1, _SIBLINGS_MAX)]]


def _end_of_lines(file: int, size: int) -> int:
    """Where the last whole line ends: a process may have been killed while it wrote."""
    at = max(0, size - LINE_BYTES_MAX - 1)
    tail = os.pread(file, size - at, at)
    return at + tail.rfind(b"\n") + 1
