"""AdapterFiles: the two files of one PEFT folder, opened and checked before any tensor is read.

Order of checks: place (inside the root after links), kind of file, config, header, names, shapes.
Nothing in the folder is executed and no path in a config is opened; files that training leaves
beside them (`optimizer.pt`, `training_args.bin`, tokenizers, `added_tokens.json`) are never opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

from replica.engine.bad_adapter import BadAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.peft_config import PeftConfig
from replica.engine.peft_keys import PeftKey, resolve
from replica.engine.safetensors_header import TensorEntry, read_header

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

_CONFIG_MAX_BYTES: Final = 1 << 20
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})

Module = tuple[int, str]
"""A linear module of the base: layer, and name inside the layer."""

Signature = tuple[int, ...]
"""What changes when a file changes: device, inode, size, times of content and of inode."""


@dataclass(frozen=True, slots=True)
class ModulePair:
    """A and B of one module, as the header describes them."""

    A: TensorEntry
    B: TensorEntry
    scaling: float

    @property
    def rank(self) -> int:
        return self.A.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    config: PeftConfig
    pairs: Mapping[Module, ModulePair]

    @property
    def rank(self) -> int:
        return max(pair.rank for pair in self.pairs.values())


def open_inside(root: Path, path: Path) -> BufferedReader:
    """Open a regular file that lies under `root` once links are followed; else BadAdapter."""
    real = confined(root, path)
    # Non-blocking, so that a named pipe in the folder cannot hold the caller.
    descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadAdapter("not_a_file", f"{path.name} is not a regular file", path.name)
    return os.fdopen(descriptor, "rb")


def confined(root: Path, path: Path) -> Path:
    """`path` with links followed; raises BadAdapter `outside_root` when that leaves `root`."""
    real = path.resolve()
    if not real.is_relative_to(root):
        raise BadAdapter("outside_root", f"{path.name} leads out of the adapter folder", path.name)
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
                "ambiguous_layout", "adapters lie in subfolders: name one of them"
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
        raise BadAdapter("missing_weights", f"no {WEIGHTS_FILE}", WEIGHTS_FILE) from None


def inspect(
    config_file: BufferedReader,
    weights_file: BufferedReader,
    names: list[str],
    model: ModelConfig,
    max_rank: int,
) -> AdapterFiles:
    """Config and header against the base; raises BadAdapter. Reads no tensor."""
    text = config_file.read(_CONFIG_MAX_BYTES + 1)
    if len(text) > _CONFIG_MAX_BYTES:
        raise BadAdapter("bad_config", f"more than {_CONFIG_MAX_BYTES} bytes", CONFIG_FILE)
    config = PeftConfig.parse(text, names)
    size_bytes = os.fstat(weights_file.fileno()).st_size
    entries = read_header(weights_file, size_bytes, WEIGHTS_FILE)
    if not any(entry.end > entry.start for entry in entries.values()):
        raise BadAdapter("empty_weights", "no tensor has an element: save the adapter again")
    for tensor, entry in sorted(entries.items()):
        if entry.dtype not in _FLOATS:
            raise BadAdapter("bad_dtype", f"{tensor} is {entry.dtype}, not a float kind", tensor)
    keys = resolve(entries, model)
    _check_attachment(keys, config)
    pairs = _pair(keys, entries, config)
    _check_shapes(pairs, keys, model)
    files = AdapterFiles(config, pairs)
    if files.rank > max_rank:
        raise BadAdapter(
            "rank_exceeds_max", f"rank {files.rank} is over this replica's {max_rank}", "r"
        )
    return files


def _check_attachment(keys: list[PeftKey], config: PeftConfig) -> None:
    for key in keys:
        if not config.names_module(key.path, key.layer):
            raise BadAdapter(
                "unmatched_keys",
                f"{key.tensor} is in the file, but target_modules and layers_to_transform leave "
                "its module out: PEFT would pass over it",
                key.tensor,
            )


def _pair(
    keys: list[PeftKey], entries: Mapping[str, TensorEntry], config: PeftConfig
) -> dict[Module, ModulePair]:
    halves: dict[Module, dict[str, PeftKey]] = {}
    for key in keys:
        pair = halves.setdefault((key.layer, key.module), {})
        if key.half in pair:
            raise BadAdapter(
                "duplicate_keys", f"{key.tensor} and {pair[key.half].tensor} are one", key.tensor
            )
        pair[key.half] = key
    pairs = {}
    for module, pair in sorted(halves.items()):
        if len(pair) == 1:
            (key,) = pair.values()
            raise BadAdapter("missing_pair", f"{key.tensor} has no other half", key.tensor)
        A, B = entries[pair["A"].tensor], entries[pair["B"].tensor]
        rank = A.shape[0] if A.shape else 0
        wanted = config.rank_of(pair["A"].path)
        if rank != wanted:
            raise BadAdapter(
                "rank_config_mismatch",
                f"{pair['A'].tensor} has rank {rank}, adapter_config.json says {wanted}",
                pair["A"].tensor,
            )
        pairs[module] = ModulePair(A, B, config.scaling_of(pair["A"].path, rank))
    return pairs


def _check_shapes(
    pairs: Mapping[Module, ModulePair], keys: list[PeftKey], model: ModelConfig
) -> None:
    widths = {
        module: (group.in_features, out)
        for group in model.groups
        for module, out in zip(group.modules, group.out_features, strict=True)
    }
    wrong = []
    for (layer, module), pair in pairs.items():
        inside, out = widths[module]
        if pair.A.shape != (pair.rank, inside) or pair.B.shape != (out, pair.rank):
            wrong.append((layer, module))
    if wrong:
        layer, module = wrong[0]
        pair, (inside, out) = pairs[wrong[0]], widths[module]
        raise BadAdapter(
            "base_mismatch" if len(wrong) == len(pairs) else "shape_mismatch",
            f"layer {layer} {module}: A is {list(pair.A.shape)} and B {list(pair.B.shape)}, "
            f"the base takes [r, {inside}] and [{out}, r]",
            next(key.tensor for key in keys if (key.layer, key.module) == wrong[0]),
        )
