"""The base's weights: safetensors in, matrices in the layout of the forward pass out.

A layer keeps four matrices, one a group (`ModelConfig.groups`): q, k and v under one another, o,
gate over up, down. Modules of one input then cost one matrix product, and one gathered shrink.
Every tensor the forward pass needs must be there with the right shape, and every tensor of a layer
must be one it needs: a bias or a scale that nobody adds is another model. Nothing is unpickled.

A group's matrix may be changed on its way in, while it is still float32: an adapter is folded into
it (`merged.py`), then it is quantised (`quantised.py`). One matrix is wide at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from replica.engine.host_adapter import HostAdapter
from replica.engine.merged import Merge
from replica.engine.model_config import BadBase, Group, ModelConfig
from replica.engine.packed import PackedMatrix, available
from replica.engine.quantised import Fp8Matrix, Matrix, Quantization
from replica.engine.tiny import tiny_adapter, tiny_model

__all__ = [
    "BaseWeights",
    "LayerWeights",
    "ModelConfig",
    "base_tensor",
    "load_base",
    "tiny_adapter",
    "tiny_model",
    "torch_dtype",
]

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DERIVED: Final = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm: Tensor  # [hidden]
    post_norm: Tensor  # [hidden]
    groups: tuple[Matrix, ...]  # [sum of out, in], in the order of ModelConfig.groups
    biases: tuple[Tensor | None, ...]  # [sum of out], likewise
    qk_norm: Tensor | None  # [heads + kv, d]: a row for each head of q, then of k


@dataclass(frozen=True, slots=True)
class BaseWeights:
    config: ModelConfig
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Matrix  # [vocab, hidden]; plain, it has the storage of a tied `embed`


def torch_dtype(name: str) -> torch.dtype:
    """float32, bfloat16 or float16, by the name that configurations use."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def load_base(
    folder: Path,
    dtype: torch.dtype,
    device: str,
    *,
    merged: HostAdapter | None = None,
    quantization: Quantization = Quantization.NONE,
    packed: bool = False,
) -> BaseWeights:
    """Read every weight of `folder` once, tensor by tensor; raises BadBase with the reason.

    `merged` is folded in. `packed` lays matrices out for the CPU's product where that is quicker;
    of a tied embedding there are then two copies, a plain one to look tokens up in.
    """
    config = ModelConfig.from_dir(folder)
    hidden, vocab = config.hidden_size, config.vocab_size
    merge = None if merged is None else Merge(merged, config)
    packed = (
        packed and dtype is torch.float32 and torch.device(device).type == "cpu" and available()
    )
    with ExitStack() as stack:
        reader = _Reader(folder, stack, dtype, device)
        embed = reader.read("model.embed_tokens.weight", vocab, hidden)
        layers = tuple(
            _layer(reader, config, layer, merge, quantization, packed)
            for layer in range(config.num_layers)
        )
        norm = reader.read("model.norm.weight", hidden)
        tied = config.tie_word_embeddings and not reader.has("lm_head.weight")
        head = embed if tied else reader.read("lm_head.weight", vocab, hidden)
        if config.tie_word_embeddings and torch.equal(head, embed):
            head = embed  # a tied head that was saved as well; one that differs is meant to
        return BaseWeights(config, embed, layers, norm, PackedMatrix.of(head) if packed else head)


def base_tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor as the base's files have it; a tied head is the embedding. None: no such tensor.

    Raises BadBase.
    """
    with ExitStack() as stack:
        reader = _Reader(folder, stack, torch.float32, "cpu")
        if not reader.has(name) and name == "lm_head.weight":
            name = "model.embed_tokens.weight"
        return reader.anything(name) if reader.has(name) else None


def _layer(
    reader: _Reader,
    config: ModelConfig,
    layer: int,
    merge: Merge | None,
    quantization: Quantization,
    packed: bool,
) -> LayerWeights:
    at = f"model.layers.{layer}"

    def matrix(index: int, group: Group) -> Matrix:
        exact = merge is not None or quantization is Quantization.FP8
        W = reader.fused(at, group, torch.float32 if exact else reader.dtype)
        if merge is not None:
            merge.fold(W, layer, index)
        if quantization is Quantization.FP8:
            return Fp8Matrix.of(W)
        W = W.to(reader.dtype)
        return PackedMatrix.of(W) if packed else W

    weights = LayerWeights(
        input_norm=reader.read(f"{at}.input_layernorm.weight", config.hidden_size),
        post_norm=reader.read(f"{at}.post_attention_layernorm.weight", config.hidden_size),
        groups=tuple(matrix(index, group) for index, group in enumerate(config.groups)),
        biases=tuple(reader.fused_bias(at, group) for group in config.groups),
        qk_norm=_qk_norm(reader, config, at) if config.qk_norm else None,
    )
    reader.refuse_unread(f"{at}.")
    return weights


def _qk_norm(reader: _Reader, config: ModelConfig, at: str) -> Tensor:
    q = reader.read(f"{at}.self_attn.q_norm.weight", config.head_dim)
    k = reader.read(f"{at}.self_attn.k_norm.weight", config.head_dim)
    return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))


class _Reader:
    """Names to tensors, over one safetensors file or the shards of an index."""

    def __init__(self, folder: Path, stack: ExitStack, dtype: torch.dtype, device: str) -> None:
        self._folder = folder
        self.dtype = dtype
        self._device = device
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._seen: set[str] = set()
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise BadBase(f"{path}: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, *shape: int) -> Tensor:
        # Copied even when nothing changes: what safetensors gives is a view of the file on disk.
        return self._mapped(name, shape).to(device=self._device, dtype=self.dtype, copy=True)

    def anything(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name).clone()

    def fused(self, at: str, group: Group, dtype: torch.dtype) -> Tensor:
        """The group's matrices under one another: [sum of out, in]."""
        rows = sum(group.out_features)
        W = torch.empty(rows, group.in_features, dtype=dtype, device=self._device)
        for module, (start, end) in zip(group.modules, group.columns, strict=True):
            W[start:end] = self._mapped(f"{at}.{module}.weight", (end - start, group.in_features))
        return W

    def fused_bias(self, at: str, group: Group) -> Tensor | None:
        """The group's biases after one another: [sum of out]."""
        if not group.bias:
            return None
        parts = zip(group.modules, group.out_features, strict=True)
        return torch.cat([self.read(f"{at}.{module}.bias", width) for module, width in parts])

    def refuse_unread(self, prefix: str) -> None:
        """A table of frequencies that old versions saved is the one thing that may be left over."""
        for name in self._files:
            if name.startswith(prefix) and name not in self._seen and not name.endswith(_DERIVED):
                raise BadBase(
                    f"{self._folder}: the layers of its model_type have no {name}, and config.json "
                    "asks for none; is model_type right, and are these plain weights?"
                )

    def _mapped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._files:
            raise BadBase(f"{self._folder}: no tensor {name}; is the base complete?")
        self._seen.add(name)
        tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise BadBase(
                f"{self._folder}: {name} is {tuple(tensor.shape)}, config.json makes it {shape}"
            )
        if tensor.dtype not in _FLOATS:
            raise BadBase(
                f"{self._folder}: {name} is {tensor.dtype}, a quantised weight without its scale; "
                "convert the base to plain float weights"
            )
        return tensor


def _files(folder: Path) -> Iterator[Path]:
    if (folder / _SINGLE).is_file():
        yield folder / _SINGLE
        return
    if not (folder / _INDEX).is_file():
        raise BadBase(f"{folder}: neither {_SINGLE} nor {_INDEX}; only safetensors are read")
    try:
        shards = set(json.loads((folder / _INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadBase(f"{folder / _INDEX}: not an index: {error!r}") from error
    for shard in sorted(shards):
        if Path(shard).name != shard:
            raise BadBase(f"{folder / _INDEX}: the shard {shard!r} is not in the folder")
        yield folder / shard
