"""A Llama of a few hundred weights as a GGUF, and the weights it was made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

Weight = NDArray[np.float32]

HEADS, KV_HEADS, HIDDEN, INNER = 4, 2, 16, 24
_CONTROL, _NORMAL = 3, 1
_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    "ab",
]


def tiny_gguf(
    path: Path, permute: Callable[[Weight, int], Weight], *, architecture: str = "llama"
) -> dict[str, Weight]:
    """Write `path`; the weights by their Hugging Face names, as they were before."""
    dice = np.random.default_rng(0)
    width = HIDDEN // HEADS
    shapes = {
        "self_attn.q_proj": ("attn_q", HEADS * width, HIDDEN),
        "self_attn.k_proj": ("attn_k", KV_HEADS * width, HIDDEN),
        "self_attn.v_proj": ("attn_v", KV_HEADS * width, HIDDEN),
        "self_attn.o_proj": ("attn_output", HIDDEN, HEADS * width),
        "mlp.gate_proj": ("ffn_gate", INNER, HIDDEN),
        "mlp.up_proj": ("ffn_up", INNER, HIDDEN),
        "mlp.down_proj": ("ffn_down", HIDDEN, INNER),
        "input_layernorm": ("attn_norm", HIDDEN),
        "post_attention_layernorm": ("ffn_norm", HIDDEN),
    }
    writer = GGUFWriter(path, architecture)
    weights: dict[str, Weight] = {}

    def add(hf: str, gguf: str, *shape: int) -> None:
        weight = dice.standard_normal(shape).astype(np.float32)
        weights[f"{hf}.weight"] = weight
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(gguf.split(".")[-1])
        writer.add_tensor(f"{gguf}.weight", permute(weight, heads) if heads else weight)

    add("model.embed_tokens", "token_embd", len(_TOKENS), HIDDEN)
    add("model.norm", "output_norm", HIDDEN)
    for hf, (gguf, *shape) in shapes.items():
        add(f"model.layers.0.{hf}", f"blk.0.{gguf}", *map(int, shape))
    _describe(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _describe(writer: GGUFWriter) -> None:
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([_CONTROL] * 3 + [_NORMAL] * (len(_TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
