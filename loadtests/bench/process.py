"""Programs that a bench measures: started until they say where they listen, and what they used."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path


@contextlib.asynccontextmanager
async def program(module: str, *words: str) -> AsyncIterator[tuple[int, list[str]]]:
    """Its process id, and the addresses of its ready line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *words), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await process.stdout.readline()).decode()
        if " on " not in line:
            raise SystemExit(f"{module} did not start: {line!r}")
        yield process.pid, line.partition(" on ")[2].split()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def require_proc() -> None:
    """Raises SystemExit where CPU cannot be counted."""
    if not Path("/proc/self/task").exists():
        raise SystemExit("this counts CPU as Linux keeps it (/proc); run it in a container")


def cpu_s(pid: int) -> float:
    """What all threads of a process and of those it started have run."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[0])
        for child in (task / "children").read_text().split():
            total_ns += int(cpu_s(int(child)) * 1e9)
    return total_ns / 1e9


def busy_s() -> float:
    """What all processes of this machine have run, in all cores together."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / 100
