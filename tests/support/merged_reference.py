"""MergedReference: transformers on the base with changes added to its matrices, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS = tuple(range(5, 22))


class MergedReference:
    def __init__(self, base_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._base_dir = base_dir
        self._model: Any = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
        self._model.eval()

    def logits(self, deltas: Mapping[str, Tensor]) -> Tensor:
        """Of the token after TOKENS: [vocab]. `deltas` by module path, [out, in]."""
        kept = {}
        for path, delta in deltas.items():
            weight = self._model.get_submodule(path).weight.data
            kept[path] = weight.clone()
            weight += delta.float()
        try:
            return self._next()
        finally:
            for path, weight in kept.items():
                self._model.get_submodule(path).weight.data.copy_(weight)

    def peft_logits(self, folder: Path) -> Tensor:
        """The same by PEFT itself, from the folder."""
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(self._model, folder)
        try:
            adapted.eval()
            with torch.no_grad():
                return adapted(torch.tensor([TOKENS])).logits[0, -1]
        finally:
            self._model = adapted.unload()

    def _next(self) -> Tensor:
        with torch.no_grad():
            return self._model(torch.tensor([TOKENS])).logits[0, -1]
