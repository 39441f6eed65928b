"""Environment: a virtual environment for a program whose packages must not mix with ours."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path


class NotInstalled(Exception):
    """pip could not; the text is the end of what it said."""


async def environment(folder: Path, *packages: str) -> Path:
    """The `bin` of `folder`, with the packages in it; made when it is not there."""
    done = folder / ".done"
    if not await asyncio.to_thread(done.exists):
        await _run(sys.executable, "-m", "venv", str(folder))
        pip = str(folder / "bin" / "pip")
        await _run(pip, "install", "--disable-pip-version-check", "--quiet", *packages)
        await asyncio.to_thread(done.write_text, "\n".join(packages))
    return folder / "bin"


async def _run(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise NotInstalled(said.decode(errors="replace")[-2000:])
