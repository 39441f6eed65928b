"""PeftUpload: an adapter as somebody uploads it, with the change it makes worked out by hand.

`pairs` and `scale` are the truth; `config`, `tensors` and `files` are how it is written down. A
variant alters how it is written; what it computes stays `deltas()`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from replica.engine.model_config import ModelConfig

PREFIX = "base_model.model."
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Place = str
"""A module of the base: `model.layers.0.self_attn.q_proj`."""


@dataclass
class PeftUpload:
    pairs: dict[Place, tuple[Tensor, Tensor]]
    scale: Callable[[Place], float]
    config: dict[str, Any] | None
    tensors: dict[str, Tensor]
    files: dict[str, bytes] = field(default_factory=dict)
    weights: str | None = "adapter_model.safetensors"
    grown_bytes: int = 0  # the weights file is as long as this, with nothing in it

    def deltas(self) -> dict[Place, Tensor]:
        return {path: self.scale(path) * (b @ a) for path, (a, b) in self.pairs.items()}

    def rename(self, change: Callable[[str], str]) -> None:
        self.tensors = {change(name): tensor for name, tensor in self.tensors.items()}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        if self.config is not None:
            (folder / "adapter_config.json").write_text(json.dumps(self.config))
        if self.weights is not None:
            whole = {name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}
            save_file(whole, folder / self.weights, metadata={"format": "pt"})
            if self.grown_bytes:
                os.truncate(folder / self.weights, self.grown_bytes)
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def upload(
    base: ModelConfig,
    *,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    r: int = 4,
    alpha: float = 8,
    ranks: Mapping[str, int] | None = None,
    layers: Iterable[int] = (0, 1),
    scale: float | Callable[[Place], float] | None = None,
    seed: int = 7,
    **config: Any,
) -> PeftUpload:
    """As PEFT saves it; `ranks` by module name; `scale` by hand where it is not alpha / r."""
    dice = torch.Generator().manual_seed(seed)
    pairs = {}
    for layer in layers:
        for group in base.groups:
            for module, out in zip(group.modules, group.out_features, strict=True):
                target = module.rpartition(".")[2]
                if target not in targets:
                    continue
                rank = (ranks or {}).get(target, r)
                a = torch.randn(rank, group.in_features, generator=dice)
                b = torch.randn(out, rank, generator=dice)
                pair = (a / math.sqrt(group.in_features), 0.3 * b / math.sqrt(rank))
                pairs[f"model.layers.{layer}.{module}"] = pair
    by_hand = scale if scale is not None else alpha / r
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": r,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    tensors = {}
    for path, (a, b) in pairs.items():
        tensors |= {f"{PREFIX}{path}.lora_A.weight": a, f"{PREFIX}{path}.lora_B.weight": b}
    return PeftUpload(
        pairs,
        by_hand if callable(by_hand) else lambda _: by_hand,
        written | config,
        tensors,
    )
