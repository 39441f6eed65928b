"""A good PEFT folder, and ways to spoil it as uploads are spoiled."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from replica.engine.adapter_store import AdapterFolder, Found, Refused
from replica.engine.model_config import ModelConfig
from shared.ids import AdapterId

MAX_RANK = 16
NAME = AdapterId("good")

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]


def judge(root: Path, config: ModelConfig) -> Found | Refused:
    """The verdict on the only folder there."""
    (verdict,) = AdapterFolder(root, MAX_RANK, config).scan()
    return verdict


def edit_config(folder: Path, changes: Mapping[str, Any]) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, change: Change) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({k: v.clone().contiguous() for k, v in change(load_file(path)).items()}, path)


def rename(old: str, new: str) -> Change:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


def mapped(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Change the tensors whose name holds `part`."""
    return lambda tensors: {k: change(v) if part in k else v for k, v in tensors.items()}


def with_tensor(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors | {name: tensor}
