"""Adapters against bases of other families: shapes, biases and norms are each family's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from uploads import NAME, edit_config, edit_tensors, judge, rename, with_tensor

from replica.engine.adapter_store import Found, Refused
from replica.engine.family import FAMILIES
from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_adapter, tiny_model

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def _base(folder: Path, family: str) -> ModelConfig:
    biased = {"attention_bias": True} if family in ("llama", "qwen3") else {}
    return tiny_model(folder, family=family, extra=biased)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_an_adapter_of_every_linear_fits_its_family(family: str, tmp_path: Path) -> None:
    config = _base(tmp_path / "base", family)
    tiny_adapter(tmp_path / "adapters" / NAME, config, targets=EVERY)
    assert isinstance(judge(tmp_path / "adapters", config), Found)


@pytest.mark.filterwarnings("ignore")  # of PEFT, about itself
@pytest.mark.parametrize("family", list(FAMILIES))
def test_what_peft_saves_on_a_biased_base_is_served(family: str, tmp_path: Path) -> None:
    """The base's own biases are not in the file, and are no change of the adapter's."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = _base(tmp_path / "base", family)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    recipe = LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(model, recipe).save_pretrained(tmp_path / "adapters" / NAME)
    (tmp_path / "adapters" / NAME / "README.md").unlink(missing_ok=True)
    saved = load_file(tmp_path / "adapters" / NAME / "adapter_model.safetensors")
    assert not any("bias" in name for name in saved)
    assert isinstance(judge(tmp_path / "adapters", config), Found)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize(
    ("tensor", "code"),
    [
        (f"{Q}.lora_B.bias", "unsupported_feature:lora_bias"),
        (f"{Q}.base_layer.bias", "unsupported_feature:bias"),
        (f"{Q}.bias", "unsupported_feature:bias"),
        (f"{Q.replace('q_proj', 'q_norm')}.weight", "modified_base_weights"),
        (f"{Q}.base_layer.weight", "modified_base_weights"),
    ],
)
def test_a_changed_bias_or_norm_is_refused_whatever_the_family_has(
    tensor: str, code: str, family: str, tmp_path: Path
) -> None:
    config = _base(tmp_path / "base", family)
    tiny_adapter(tmp_path / "adapters" / NAME, config)
    edit_tensors(tmp_path / "adapters" / NAME, with_tensor(tensor, torch.ones(64)))
    verdict = judge(tmp_path / "adapters", config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == code


def test_an_adapter_on_the_norm_of_a_head_is_no_module(tmp_path: Path) -> None:
    config = _base(tmp_path / "base", "qwen3")
    tiny_adapter(tmp_path / "adapters" / NAME, config)
    edit_tensors(tmp_path / "adapters" / NAME, rename("q_proj", "q_norm"))
    edit_config(tmp_path / "adapters" / NAME, {"target_modules": ["q_norm", "v_proj"]})
    verdict = judge(tmp_path / "adapters", config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == "unknown_module"


def test_heads_wider_than_the_hidden_size_make_another_shape(tmp_path: Path) -> None:
    """Qwen3's o takes heads x head_dim, not the hidden size, and an adapter must say so."""
    qwen3 = _base(tmp_path / "qwen3", "qwen3")
    llama = _base(tmp_path / "llama", "llama")
    tiny_adapter(tmp_path / "adapters" / NAME, llama, targets=("o_proj",))
    verdict = judge(tmp_path / "adapters", qwen3)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == "base_mismatch"
    assert "96" in verdict.message
