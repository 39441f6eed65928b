"""Folders of a random base and of random adapters, for programs that read theirs from a disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_adapter
from replica.engine.weights import BaseWeights

_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_base(folder: Path, weights: BaseWeights) -> None:
    """Config and weights, in the weights' dtype."""
    config = weights.config
    tensors = {
        "model.embed_tokens.weight": weights.embed,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    for index, layer in enumerate(weights.layers):
        at = f"model.layers.{index}"
        tensors[f"{at}.input_layernorm.weight"] = layer.input_norm
        tensors[f"{at}.post_attention_layernorm.weight"] = layer.post_norm
        for group, W in zip(config.groups, layer.groups, strict=True):
            assert isinstance(W, Tensor)
            for module, (start, end) in zip(group.modules, group.columns, strict=True):
                tensors[f"{at}.{module}.weight"] = W[start:end]
    apart = {name: each.cpu().clone() for name, each in tensors.items()}
    save_file(apart, folder / "model.safetensors")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    raw = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(raw))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """One that spells every token differently; text is encoded byte by byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"\u0120t{i}" for i in range(len(alphabet), vocab))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_adapters(root: Path, config: ModelConfig, *, rank: int, count: int, files: int) -> None:
    """PEFT folders a0, a1, … on all modules; the names beyond `files` share their weights."""
    for i in range(count):
        folder = root / f"a{i}"
        if i < files:
            tiny_adapter(
                folder, config, i, r=rank, targets=_TARGETS, alpha=2 * rank, strength=0.04,
                dtype=torch.bfloat16,
            )  # fmt: skip
            continue
        folder.mkdir()
        for file in (root / f"a{i % files}").iterdir():
            (folder / file.name).hardlink_to(file)
