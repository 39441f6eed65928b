"""The demo's base and adapters, fetched across the process border: no replica code is imported."""

from __future__ import annotations

import asyncio
import filecmp
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.cli.failure import Failure
from gateway.cli.home import Home

_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")


async def prepare_base(home: Home, say: Callable[[str], None]) -> Path:
    """Run `python -m replica.demo.base`, pass its progress on, return the folder."""
    _package()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replica.demo.base", "--data-dir", str(home.root)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        last = ""
        async for line in process.stdout:
            if last:
                say(last)
            last = line.decode().rstrip()
        errors = (await process.stderr.read()).decode().strip()
        if await process.wait() != 0:
            raise Failure(errors or "the demo base could not be prepared")
        return Path(last)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def demo_adapters() -> list[str]:
    return [source.name for source in _sources()]


def seed_adapters(folder: Path) -> None:
    """Lay the demo adapters into `folder`; what else lies there is its owner's and stays."""
    for source in _sources():
        target = folder / source.name
        if _same(source, target):
            continue
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
            fresh = Path(making) / source.name
            shutil.copytree(source, fresh)
            if target.exists():
                target.rename(Path(making) / "old")
            fresh.rename(target)


def _sources() -> list[Path]:
    return sorted(p for p in _package().joinpath("demo", "adapters").iterdir() if p.is_dir())


def _same(source: Path, target: Path) -> bool:
    return all(
        (target / name).is_file() and filecmp.cmp(source / name, target / name, shallow=False)
        for name in _FILES
    )


def _package() -> Path:
    """Where the replica is installed; found, not imported, so no tensor library is loaded."""
    spec = importlib.util.find_spec("replica")
    if spec is None or not spec.submodule_search_locations:
        raise Failure("the replica is not installed here: pip install 'loraplex[replica,demo]'")
    return Path(os.fspath(spec.submodule_search_locations[0]))
