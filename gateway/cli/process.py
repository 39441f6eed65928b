"""One process of the fleet: started until it says it is ready, watched, ended politely.

It gets a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone and the
parts end in their order; and it is told by the kernel when the supervisor dies, so that a killed
`loraplex up` leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from gateway.cli.failure import Failure
from shared.tasks import spawn

_READY: Final = re.compile(rb"\bready on (https?://\S+)")
_LOG_MAX_BYTES: Final = 16 << 20
_TAIL_BYTES: Final = 8192
_PR_SET_PDEATHSIG: Final = 1


class Died(Failure):
    """A process ended although nobody asked it to; the text ends with its log's last lines."""


class Child:
    """`start` may be called again after the process has ended: same name, same log."""

    def __init__(self, *, name: str, log: Path, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._environ = {**os.environ, **environ}
        self._process: asyncio.subprocess.Process | None = None
        self._log_from = 0  # where in its log this start begins

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, arguments: Sequence[str], *, timeout_s: float) -> str:
        """Run `python -m ARGUMENTS` and return the URL of its ready line. Raises Died."""
        with _log_file(self.log) as log:
            self._log_from = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self._environ,
                start_new_session=True,
                preexec_fn=_ends_with_parent(),
            )
        stdout = self._process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while line := await stdout.readline():
                    if match := _READY.search(line):
                        spawn(_copy(stdout, self.log), name=f"stdout of {self.name}")
                        return match[1].decode()
        except TimeoutError:
            self.kill()
            raise Died(f"{self.name} was not ready in {timeout_s:g} s.\n{self.tail()}") from None
        code = await self.exited()
        raise Died(f"{self.name} {how(code)} before it was ready.\n{self.tail()}")

    async def exited(self) -> int:
        """Wait for the end; the exit status, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, and after the grace SIGKILL. Harmless when it has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def tail(self, lines: int = 12) -> str:
        """The last lines that this start wrote to its log, for a message."""
        return end_of(self.log, self._log_from, lines)


def end_of(log: Path, start: int, lines: int = 12) -> str:
    """The last lines of a log from the byte `start` on, for a message."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - _TAIL_BYTES))
            last = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return ""
    return "\n".join([f"The end of {log}:", *(f"  {line}" for line in last)])


def how(code: int) -> str:
    """An exit status in words."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _log_file(path: Path) -> BinaryIO:
    """Append; the log of a long life is moved aside once, so that two files are the most."""
    if path.exists() and path.stat().st_size > _LOG_MAX_BYTES:
        path.replace(path.with_suffix(".old.log"))
    return path.open("ab")


async def _copy(stdout: asyncio.StreamReader, log: Path) -> None:
    """A pipe nobody reads would stop its writer one day."""
    while line := await stdout.readline():
        with log.open("ab") as file:
            file.write(line)


def _ends_with_parent() -> Callable[[], None] | None:
    """What the child asks of the kernel before it becomes the program; Linux only."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # found now: between fork and exec little is safe

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return ask
