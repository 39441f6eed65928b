"""The conversion undoes exactly what GGUF did, on a Llama small enough to know by heart."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from safetensors import safe_open
from tiny_gguf import HEADS, KV_HEADS, tiny_gguf
from tokenizers import Tokenizer

from replica.demo.gguf import NotALlama, convert, hf_name, to_bfloat16, unpermute


def permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """What llama.cpp's converter does to q and k."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@given(heads=st.integers(1, 4), half=st.integers(1, 4), width=st.integers(1, 3))
def test_unpermute_undoes_permute(heads: int, half: int, width: int) -> None:
    weight = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(-1, width)
    assert np.array_equal(unpermute(permute(weight, heads), heads), weight)


@given(arrays(np.float32, 8, elements=st.floats(width=32, allow_nan=False)))
def test_rounding_to_bfloat16_is_torchs(values: NDArray[np.float32]) -> None:
    ours = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("gguf", "hf"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ],
)
def test_names_are_those_of_hugging_face(gguf: str, hf: str) -> None:
    assert hf_name(gguf) == hf


@pytest.mark.parametrize("name", ["blk.0.ssm_in.weight", "mystery.weight", "blk.0", ""])
def test_a_tensor_that_is_not_llamas_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotALlama, match=re.escape(repr(name))):
        hf_name(name)


def test_a_whole_llama_comes_out_as_it_was(tmp_path: Path) -> None:
    weights = tiny_gguf(tmp_path / "model.gguf", permute)
    convert(tmp_path / "model.gguf", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(weights)
        for name, weight in weights.items():
            expected = torch.from_numpy(weight).to(torch.bfloat16)
            assert torch.equal(file.get_tensor(name), expected), name
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["rms_norm_eps"] == 1e-5
    assert config["tie_word_embeddings"] is True
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>ab 12"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>").ids == [1]


def test_the_same_file_gives_the_same_bytes(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "model.gguf", permute)
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        convert(tmp_path / "model.gguf", folder)
    one, two = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == two


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "model.gguf", permute, architecture="mamba")
    with pytest.raises(NotALlama, match="mamba"):
        convert(tmp_path / "model.gguf", tmp_path)
