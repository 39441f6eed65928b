"""A Llama-family GGUF as the Hugging Face folder it was made from, weights in bfloat16.

What differs between the two, and is undone here:

- names: `blk.7.attn_q.weight` is `model.layers.7.self_attn.q_proj.weight`;
- quantisation: each tensor is de-quantised to float32, then rounded to bfloat16 (nearest, ties
  to even), which is what `torch.Tensor.to(bfloat16)` does;
- rotary order: GGUF interleaves the two halves of each q and k head, HF keeps them apart, so
  their rows are un-permuted. Without it the model still writes English, but not its own.

No torch: it takes longer to import than the whole conversion of a small model takes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_LAYER_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_PARTS: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_DIGITS_APART: Final = frozenset({"smollm", "refact", "starcoder", "command-r"})
"""GGUF names of pre-tokenizers that split a number into its digits."""

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF vocabulary


class NotALlama(ValueError):
    """The GGUF holds something this converter does not know; the text says what."""


@dataclass(frozen=True, slots=True)
class Bfloat16:
    """A tensor as its 16-bit patterns: numpy has no bfloat16 of its own."""

    name: str
    bits: NDArray[np.uint16]


def convert(source: Path, out: Path) -> None:
    """Write config, tokenizer and weights of the GGUF `source` into the folder `out`.

    The same bytes come out of the same file every time. Raises NotALlama.
    """
    reader = GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        raise NotALlama(f"{source.name}: architecture {meta.get('general.architecture')!r}")
    tensors = list(_tensors(reader, meta))
    tied = all(tensor.name != "lm_head.weight" for tensor in tensors)
    write_safetensors(out / "model.safetensors", tensors)
    _tokenizer(meta).save(str(out / "tokenizer.json"))
    _write_json(out / "config.json", _model_config(meta, tied=tied))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(meta))
    _write_json(out / "generation_config.json", _special_ids(meta))


def hf_name(name: str) -> str:
    """`blk.0.ffn_up.weight` -> `model.layers.0.mlp.up_proj.weight`; raises NotALlama."""
    stem, _, kind = name.rpartition(".")
    try:
        if not stem.startswith("blk."):
            return f"{_TOP_PARTS[stem]}.{kind}"
        _, index, part = stem.split(".", 2)
        return f"model.layers.{index}.{_LAYER_PARTS[part]}.{kind}"
    except (KeyError, ValueError):
        raise NotALlama(f"tensor {name!r} has no place in a Llama model") from None


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads, half, 2] -> [heads, 2, half]: interleaved rotary pairs to halves."""
    rows = weight.shape[0]
    pairs = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(weight: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Upper half of each float32, rounded to nearest, ties to even. No NaN comes in."""
    bits = np.ascontiguousarray(weight, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: list[Bfloat16]) -> None:
    """Header length (u64, little endian), JSON header, then the tensors back to back."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.bits.nbytes
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.bits.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants its data aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor.bits.astype("<u2", copy=False).tobytes())


def _tensors(reader: GGUFReader, meta: dict[str, Any]) -> Iterator[Bfloat16]:
    heads = {
        "attn_q.weight": meta["llama.attention.head_count"],
        "attn_k.weight": meta["llama.attention.head_count_kv"],
    }
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_freqs"):
            continue  # derived from the config
        weight = dequantize(tensor.data, tensor.tensor_type)
        if count := heads.get(".".join(tensor.name.split(".")[2:])):
            weight = unpermute(weight, count)
        yield Bfloat16(hf_name(tensor.name), to_bfloat16(weight))


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    prefix_space = bool(meta.get("tokenizer.ggml.add_space_prefix", False))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)]
    if meta.get("tokenizer.ggml.pre") in _DIGITS_APART:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, kind in kinds if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in kinds if kind == _USER_DEFINED]
    )
    return tokenizer


def _model_config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": meta.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # GGUF keeps float32: 1e-5 reads back as 9.99999974e-06
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": meta.get("llama.vocab_size", len(meta["tokenizer.ggml.tokens"])),
        **_special_ids(meta),
    }


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    ids = _special_ids(meta)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }
    if (unknown := meta.get("tokenizer.ggml.unknown_token_id")) is not None:
        config["unk_token"] = tokens[unknown]
    return config


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    eos = meta["tokenizer.ggml.eos_token_id"]
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", eos),
    }


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
