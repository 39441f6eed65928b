"""Bases on disk: what loads, what is refused, and the tiny one that tests serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from replica.engine.model_config import BadBase, ModelConfig
from replica.engine.tiny import tiny_model
from replica.engine.weights import load_base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny_model(tmp_path, seed=4)
    return tmp_path


def _edit(base: Path, **changes: Any) -> None:
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_equal_seeds_write_equal_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        tiny_model(tmp_path / name, seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


def test_modules_of_a_group_lie_under_one_another(base: Path) -> None:
    weights = load_base(base, torch.float32, "cpu")
    raw = load_file(base / "model.safetensors")
    names = ("q_proj", "k_proj", "v_proj")
    parts = [raw[f"model.layers.1.self_attn.{name}.weight"] for name in names]
    assert torch.equal(weights.layers[1].groups[0], torch.cat(parts))


def test_a_tied_head_is_the_embedding_itself(tmp_path: Path) -> None:
    tiny_model(tmp_path, tied=True)
    weights = load_base(tmp_path, torch.float32, "cpu")
    assert weights.head.data_ptr() == weights.embed.data_ptr()


def test_shards_load_as_one_file(base: Path, tmp_path: Path) -> None:
    whole = load_base(base, torch.float32, "cpu")
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, base / file)
    places = {name: file for file, held in halves.items() for name in held}
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    sharded = load_base(base, torch.float32, "cpu")
    for a, b in zip(whole.layers, sharded.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.groups, b.groups, strict=True))


def test_a_shard_outside_the_folder_is_refused(base: Path) -> None:
    (base / "model.safetensors").rename(base.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadBase, match="not in the folder"):
        load_base(base, torch.float32, "cpu")


def test_the_loaded_base_does_not_hang_on_its_file(base: Path) -> None:
    weights = load_base(base, torch.float32, "cpu")
    before = weights.embed.clone()
    with open(base / "model.safetensors", "r+b") as file:
        file.truncate(0)
    assert torch.equal(weights.embed, before)


@pytest.mark.parametrize("fault", ["missing", "shape", "file"])
def test_a_broken_base_is_refused_by_name(fault: str, base: Path) -> None:
    path = base / "model.safetensors"
    tensors = load_file(path)
    if fault == "missing":
        del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(3) if fault == "shape" else torch.ones(64)
    save_file(tensors, path)
    if fault == "file":
        path.write_bytes(path.read_bytes()[:100])
    expected = {"missing": "up_proj", "shape": "model.norm.weight", "file": "model.safetensors"}
    with pytest.raises(BadBase, match=expected[fault]):
        load_base(base, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_computed_is_refused_by_its_key(
    changes: dict[str, Any], words: str, base: Path
) -> None:
    _edit(base, **changes)
    with pytest.raises(BadBase, match=words):
        ModelConfig.from_dir(base)


def test_a_folder_without_config_says_what_a_base_is(tmp_path: Path) -> None:
    with pytest.raises(BadBase, match="Hugging Face folder"):
        ModelConfig.from_dir(tmp_path)


def test_both_spellings_of_rope_are_one(base: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    _edit(base, rope_theta=500.0, rope_scaling=scaling)
    older = ModelConfig.from_dir(base)
    _edit(base, rope_theta=None, rope_scaling=None, rope_parameters=scaling | {"rope_theta": 500.0})
    assert ModelConfig.from_dir(base) == older


def test_end_tokens_come_from_the_generation_config(base: Path) -> None:
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert ModelConfig.from_dir(base).eos_token_ids == {2, 9}
    (base / "generation_config.json").unlink()
    assert ModelConfig.from_dir(base).eos_token_ids == {2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(st.text())
def test_the_tiny_tokenizer_gives_any_text_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert all(token < 265 for token in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_tiny_tokenizer_knows_the_chat_marks(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids[::2][0] == 1
    assert tokenizer.token_to_id("<|im_end|>") == 2
