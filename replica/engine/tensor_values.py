"""TensorValues: the numbers of an upload, once its header is known to be right."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from replica.engine.adapter_tensors import AdapterTensors, Module
from replica.engine.bad_adapter import BadAdapter
from replica.engine.safetensors_header import TensorEntry

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def tensor(data: bytearray, entry: TensorEntry) -> Tensor:
    """A view of the file's bytes."""
    dtype = _DTYPES[entry.dtype]
    count = (entry.end - entry.start) // dtype.itemsize
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
    return flat.view(entry.shape)


def check_values(data: bytearray, tensors: AdapterTensors) -> None:
    """Raises BadAdapter `non_finite` or `zero_effect`."""
    broken = non_finite(data, tensors)
    if broken:
        layer, module = broken[0]
        raise BadAdapter(
            "non_finite",
            f"layer {layer} {module} holds NaN or infinity, as do {len(broken) - 1} more modules: "
            "the training diverged; use an earlier checkpoint",
            f"layers.{layer}.{module}",
        )
    pairs = tensors.pairs.values()
    halves = ((tensor(data, pair.A), tensor(data, pair.B)) for pair in pairs)
    if not any(A.count_nonzero() and B.count_nonzero() for A, B in halves):
        raise BadAdapter(
            "zero_effect",
            "lora_A or lora_B is zero in every module: the adapter was never trained, or its "
            "weights were not gathered when it was saved",
        )


def non_finite(data: bytearray, tensors: AdapterTensors) -> list[Module]:
    return [
        module
        for module, pair in tensors.pairs.items()
        if not all(is_finite(tensor(data, half)) for half in (pair.A, pair.B))
    ]


def is_finite(values: Tensor) -> bool:
    """By one sum, which is finite only if every term is. (Nobody's weights overflow it.)"""
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    return bool(torch.isfinite(values.sum(dtype=wide)))
