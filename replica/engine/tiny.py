"""A whole base and a whole adapter in a few kilobytes, random but seeded: what tests serve.

They are ordinary folders: config, safetensors, a byte-level BPE tokenizer that encodes any text, a
chat template, PEFT's own adapter layout. `transformers` and PEFT open them as they would any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from replica.engine.family import FAMILIES
from replica.engine.model_config import ModelConfig

_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES: Final = (("t", "h"), ("th", "e"), ("i", "n"), ("Ġ", "a"), ("a", "n"), ("e", "r"))
_VOCAB: Final = len(_SPECIALS) + 256 + len(_MERGES)

_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


_KEYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": {
        "head_dim": 24,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
}
"""What a family's config says of itself. Windows are short, so that short texts outgrow them."""


def tiny_model(
    path: Path,
    seed: int = 0,
    *,
    family: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    inner: int = 128,
    context: int = 512,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Write a base's folder to `path`; equal arguments write equal bytes.

    `family` is a `model_type`; `extra` goes into `config.json` as it is, last.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "vocab_size": _VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
        **_KEYS[family],
        **(extra or {}),
    }
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write(path / "config.json", config)
    _write(path / "generation_config.json", ends)
    _write_tokenizer(path, context)
    parsed = ModelConfig.from_dir(path)
    save_file(_base_tensors(parsed, seed), path / "model.safetensors", metadata={"format": "pt"})
    return parsed


def tiny_adapter(
    path: Path,
    config: ModelConfig,
    seed: int = 0,
    *,
    r: int = 4,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    alpha: float = 8,
    rslora: bool = False,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    layers: Sequence[int] | None = None,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a PEFT folder to `path`; pattern keys here are module names (`q_proj`).

    `strength` is about the size of the change beside the base's own output; `extra` goes into
    `adapter_config.json` as it is.
    """
    path.mkdir(parents=True, exist_ok=True)
    dice = torch.Generator().manual_seed(seed)
    ranks = rank_pattern or {}
    tensors: dict[str, Tensor] = {}
    for layer in range(config.num_layers) if layers is None else layers:
        for group in config.groups:
            for module, out in zip(group.modules, group.out_features, strict=True):
                target = module.rpartition(".")[2]
                if target not in targets:
                    continue
                rank = ranks.get(target, r)
                key = f"base_model.model.model.layers.{layer}.{module}"
                A = torch.randn(rank, group.in_features, generator=dice)
                B = torch.randn(out, rank, generator=dice)
                tensors[f"{key}.lora_A.weight"] = (A / math.sqrt(group.in_features)).to(dtype)
                tensors[f"{key}.lora_B.weight"] = (B * strength / math.sqrt(rank)).to(dtype)
    body = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": r,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "rank_pattern": dict(ranks),
        "alpha_pattern": dict(alpha_pattern or {}),
        "target_modules": list(targets),
        "layers_to_transform": None if layers is None else list(layers),
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
        **(extra or {}),
    }
    _write(path / "adapter_config.json", body)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})


def _base_tensors(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Weights wide enough that greedy text varies, norms near one."""
    dice = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=dice) / math.sqrt(columns)

    def norm(width: int = config.hidden_size) -> Tensor:
        return 1 + 0.1 * torch.randn(width, generator=dice)

    tensors = {
        "model.embed_tokens.weight": torch.randn(
            config.vocab_size, config.hidden_size, generator=dice
        )
    }
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = norm()
        tensors[f"{at}.post_attention_layernorm.weight"] = norm()
        for group in config.groups:
            for module, out in zip(group.modules, group.out_features, strict=True):
                tensors[f"{at}.{module}.weight"] = matrix(out, group.in_features)
                if group.bias:
                    tensors[f"{at}.{module}.bias"] = torch.randn(out, generator=dice) / 2
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            tensors[f"{at}.self_attn.{name}.weight"] = norm(config.head_dim)
    tensors["model.norm.weight"] = norm()
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, config.hidden_size)
    return tensors


def _write_tokenizer(path: Path, context: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*_SPECIALS, *alphabet, *(left + right for left, right in _MERGES)]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=list(_MERGES))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in _SPECIALS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": _CHAT_TEMPLATE,
    }
    _write(path / "tokenizer_config.json", settings)


def _write(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
