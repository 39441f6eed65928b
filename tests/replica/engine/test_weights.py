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

from replica.engine.family import FAMILIES
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
        ({"model_type": "gpt2"}, "model_type 'gpt2'.* served are llama .*mistral.*qwen2.*qwen3"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "gemma3", "text_config": {}}, "text_config"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts.*mixture"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "num_experts.*mixture"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures.*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
        ({"compression_config": {"format": "int"}}, "compression_config"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2, "mscale": 1}}, "mscale"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "layer to layer"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads|key heads"),
        ({"head_dim": 15}, "head_dim"),
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


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_windows_that_make_no_sense_are_refused(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, family=family)
    _edit(tmp_path, **changes)
    with pytest.raises(BadBase, match=words):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_keys_that_a_config_leaves_out_are_the_familys_own(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    body = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    body |= {"num_hidden_layers": 30, "num_attention_heads": 32, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | body))
    ours, theirs = ModelConfig.from_dir(tmp_path), AutoConfig.from_pretrained(tmp_path)
    width = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    own = ["sliding_attention" if family == "mistral" else "full_attention"] * ours.num_layers
    kinds = getattr(theirs, "layer_types", None) or own
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, width)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert [layer in ours.sliding_layers for layer in range(ours.num_layers)] == [
        kind == "sliding_attention" for kind in kinds
    ]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("family", "stray"),
    [
        ("llama", "self_attn.q_proj.bias"),
        ("mistral", "self_attn.q_norm.weight"),
        ("qwen2", "self_attn.o_proj.bias"),
        ("qwen3", "mlp.gate_proj.weight_scale"),
    ],
)
def test_a_tensor_that_no_layer_uses_is_refused_by_name(
    family: str, stray: str, tmp_path: Path
) -> None:
    tiny_model(tmp_path, family=family)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"model.layers.1.{stray}": torch.ones(8)}, path)
    with pytest.raises(BadBase, match=rf"layers\.1\.{stray}"):
        load_base(tmp_path, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_another_kind_than_float_are_refused(dtype: torch.dtype, base: Path) -> None:
    path = base / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    with pytest.raises(BadBase, match="quantised"):
        load_base(base, torch.float32, "cpu")


def test_a_saved_table_of_frequencies_is_left_alone(base: Path) -> None:
    path = base / "model.safetensors"
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(path) | table, path)
    load_base(base, torch.float32, "cpu")


def test_a_tied_head_that_was_saved_as_well_counts_when_it_differs(tmp_path: Path) -> None:
    """As transformers reads it; an equal copy takes no memory of its own."""
    tiny_model(tmp_path, tied=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embed = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embed.clone()}, path)
    same = load_base(tmp_path, torch.float32, "cpu")
    assert same.head.data_ptr() == same.embed.data_ptr()
    save_file(tensors | {"lm_head.weight": embed + 1}, path)
    assert torch.equal(load_base(tmp_path, torch.float32, "cpu").head, embed + 1)


@pytest.mark.parametrize("missing", ["self_attn.k_proj.bias", "self_attn.k_norm.weight"])
def test_what_a_family_has_must_be_in_the_file(missing: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, family="qwen3", extra={"attention_bias": True})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.0.{missing}"]
    save_file(tensors, path)
    with pytest.raises(BadBase, match=missing):
        load_base(tmp_path, torch.float32, "cpu")


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
