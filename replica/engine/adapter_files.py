"""AdapterFiles: the two files of one PEFT folder, opened and checked before any tensor is read.

Order of checks: place (inside the root after links), kind of file, config, size, header, and then
what the tensors are for (`adapter_tensors.py`). Nothing in the folder is executed and no path in a
config is opened; files that training leaves beside them (`optimizer.pt`, `training_args.bin`,
tokenizers, `added_tokens.json`) are never opened.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from replica.engine.adapter_tensors import AdapterTensors, rank_exceeds
from replica.engine.bad_adapter import BadAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.peft_config import CONFIG_FILE, PeftConfig, load_config
from replica.engine.safetensors_header import HEADER_MAX_BYTES, TensorEntry, read_header

WEIGHTS_FILE: Final = "adapter_model.safetensors"

CONFIG_MAX_BYTES: Final = 1 << 20

Signature = tuple[int, ...]
"""What changes when a file changes: device, inode, size, times of content and of inode."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    config: PeftConfig
    tensors: AdapterTensors


def open_inside(root: Path, path: Path) -> BufferedReader:
    """Open a regular file that lies under `root` once links are followed; else BadAdapter."""
    real = confined(root, path)
    fault = BadAdapter("not_a_file", f"{path.name} is not a regular file: replace it", path.name)
    if not stat.S_ISREG(os.lstat(real).st_mode):  # to open a device or a socket may do something
        raise fault
    # Non-blocking, so that a pipe that took its place meanwhile cannot hold the caller.
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise fault
    return os.fdopen(descriptor, "rb")


def confined(root: Path, path: Path) -> Path:
    """`path` with links followed; raises BadAdapter `outside_root` when that leaves `root`."""
    real = path.resolve()
    if not real.is_relative_to(root):
        raise BadAdapter(
            "outside_root",
            f"{path.name} leads out of the adapter store: put the files themselves there",
            path.name,
        )
    return real


def signature(file: BufferedReader | Path) -> Signature:
    facts = file.stat() if isinstance(file, Path) else os.fstat(file.fileno())
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def open_config(root: Path, folder: Path) -> BufferedReader:
    try:
        return open_inside(root, folder / CONFIG_FILE)
    except FileNotFoundError:
        if any(folder.glob(f"*/{CONFIG_FILE}")):
            raise BadAdapter(
                "ambiguous_layout",
                "adapters lie in subfolders: copy one of them, by itself, to the top of the store",
            ) from None
        raise BadAdapter(
            "missing_config", f"no {CONFIG_FILE} in the folder: save it with PEFT", CONFIG_FILE
        ) from None


def open_weights(root: Path, folder: Path) -> BufferedReader:
    try:
        return open_inside(root, folder / WEIGHTS_FILE)
    except FileNotFoundError:
        if any(folder.glob("adapter_model*.bin")):
            raise BadAdapter(
                "pickle_not_allowed",
                "the weights are a pickle, which could run code: save them with safetensors",
                "adapter_model.bin",
            ) from None
        raise BadAdapter(
            "missing_weights", f"no {WEIGHTS_FILE} in the folder: upload it too", WEIGHTS_FILE
        ) from None


def read_config(file: BufferedReader) -> dict[str, Any]:
    text = file.read(CONFIG_MAX_BYTES + 1)
    if len(text) > CONFIG_MAX_BYTES:
        raise BadAdapter(
            "bad_config",
            f"{CONFIG_FILE} has more than {CONFIG_MAX_BYTES} bytes: save it with PEFT",
            CONFIG_FILE,
        )
    return load_config(text)


def read_entries(
    file: BufferedReader, config: PeftConfig, model: ModelConfig, max_rank: int
) -> dict[str, TensorEntry]:
    """The weights' header; raises BadAdapter. A file larger than any that fits is not read."""
    size_bytes = os.fstat(file.fileno()).st_size
    check_size(size_bytes, config, model, max_rank)
    return read_header(file, size_bytes, WEIGHTS_FILE)


def largest_bytes(model: ModelConfig, max_rank: int) -> int:
    """Every module at the highest rank, in the widest type: no adapter that fits is larger."""
    widths = sum(
        group.in_features * len(group.modules) + sum(group.out_features) for group in model.groups
    )
    return model.num_layers * widths * max_rank * 8 + HEADER_MAX_BYTES


def check_size(size_bytes: int, config: PeftConfig, model: ModelConfig, max_rank: int) -> None:
    limit = largest_bytes(model, max_rank)
    if size_bytes <= limit:
        return
    if config.rank > max_rank:
        raise rank_exceeds(config.rank, max_rank)
    raise BadAdapter(
        "too_large",
        f"{WEIGHTS_FILE} has {size_bytes} bytes; every module of this base at rank {max_rank} "
        f"takes at most {limit}: save the adapter alone, without the base",
        WEIGHTS_FILE,
    )
