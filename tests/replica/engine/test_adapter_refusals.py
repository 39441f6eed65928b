"""Configs and tensors that must be refused, each by its own reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from uploads import (
    MAX_RANK,
    NAME,
    Change,
    Tensors,
    edit_config,
    edit_tensors,
    judge,
    mapped,
    rename,
    with_tensor,
)

from replica.engine.adapter_store import AdapterFolder, BadAdapter, Refused
from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_adapter

BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "unsupported_feature:use_dora"),
    ({"bias": "all"}, "incomplete_weights"),
    ({"bias": "lora_only"}, "incomplete_weights"),
    ({"lora_bias": True}, "unsupported_feature:lora_bias"),
    ({"modules_to_save": ["embed_tokens", "lm_head"]}, "unsupported_feature:modules_to_save"),
    ({"modules_to_save": ["score"], "task_type": "SEQ_CLS"}, "unsupported_task:SEQ_CLS"),
    ({"trainable_token_indices": [5]}, "unsupported_feature:trainable_token_indices"),
    ({"target_parameters": ["experts"]}, "unsupported_feature:target_parameters"),
    ({"init_lora_weights": "pissa"}, "requires_modified_base:pissa"),
    ({"init_lora_weights": "pissa_niter_4"}, "requires_modified_base:pissa_niter_4"),
    ({"init_lora_weights": "olora"}, "requires_modified_base:olora"),
    ({"init_lora_weights": "strange"}, "unsupported_feature:init_lora_weights"),
    ({"layer_replication": [[0, 2]]}, "unsupported_feature:layer_replication"),
    ({"alora_invocation_tokens": [1]}, "unsupported_feature:alora_invocation_tokens"),
    ({"use_qalora": True}, "unsupported_feature:use_qalora"),
    ({"arrow_config": {"top_k": 2}}, "unsupported_feature:arrow_config"),
    ({"enable_lora": [True]}, "unsupported_feature:enable_lora"),
    ({"brand_new_field": 3}, "unsupported_feature:brand_new_field"),
    ({"peft_type": "IA3"}, "unsupported_peft_type:IA3"),
    ({"peft_type": "PREFIX_TUNING"}, "unsupported_peft_type:PREFIX_TUNING"),
    ({"peft_type": None}, "not_peft_config"),
    ({"peft_type": None, "lora_parameters": {"rank": 8}}, "not_peft_config:mlx"),
    ({"r": 0}, "bad_config:r"),
    ({"r": True}, "bad_config:r"),
    ({"r": 16.0}, "bad_config:r"),
    ({"r": "16"}, "bad_config:r"),
    ({"lora_alpha": "16"}, "bad_config:lora_alpha"),
    ({"lora_alpha": 0}, "bad_config:lora_alpha"),
    ({"lora_alpha": float("nan")}, "bad_config:lora_alpha"),
    ({"use_rslora": "yes"}, "bad_config:use_rslora"),
    ({"rank_pattern": {"q_proj": 0}}, "bad_config:rank_pattern"),
    ({"rank_pattern": ["q_proj"]}, "bad_config:rank_pattern"),
    ({"alpha_pattern": {"(": 3}}, "bad_config:alpha_pattern"),
    ({"layers_to_transform": ["0"]}, "bad_config:layers_to_transform"),
    ({"r": 8}, "rank_config_mismatch"),
    ({"rank_pattern": {"q_proj": 3}}, "rank_config_mismatch"),
    ({"target_modules": ["q_proj"]}, "unmatched_keys"),
    ({"layers_to_transform": [0]}, "unmatched_keys"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "code"), BAD_CONFIGS, ids=[f"{code}-{i}" for i, (_, code) in enumerate(BAD_CONFIGS)]
)
def test_a_config_that_is_not_computed_is_refused(
    changes: dict[str, Any], code: str, root: Path, config: ModelConfig
) -> None:
    edit_config(root / NAME, changes)
    verdict = judge(root, config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == code
    assert verdict.message
    with pytest.raises(BadAdapter) as raised:
        AdapterFolder(root, MAX_RANK, config).read(NAME)
    assert raised.value.code == code


P = "base_model.model.model"
Q = f"{P}.layers.0.self_attn.q_proj"
NAN, INF = float("nan"), float("inf")

BAD_TENSORS: list[tuple[str, Change]] = [
    ("unsupported_feature:use_dora", with_tensor(f"{Q}.lora_magnitude_vector", torch.ones(64))),
    ("unsupported_feature:bias", with_tensor(f"{Q}.base_layer.bias", torch.ones(64))),
    ("unsupported_feature:lora_bias", with_tensor(f"{Q}.lora_B.bias", torch.ones(64))),
    ("unsupported_task:SEQ_CLS", with_tensor(f"{P}.score.weight", torch.ones(2, 64))),
    ("modified_base_weights", with_tensor(f"{P}.embed_tokens.weight", torch.ones(265, 64))),
    ("unsupported_module:lm_head", with_tensor(f"{P}.lm_head.lora_A.weight", torch.ones(4, 64))),
    (
        "unsupported_module:embed_tokens",
        with_tensor(f"{P}.embed_tokens.lora_embedding_A", torch.ones(4, 265)),
    ),
    ("multiple_adapters", rename("q_proj.lora_A.weight", "q_proj.lora_A.other.weight")),
    ("duplicate_keys", with_tensor(f"module.{Q}.lora_A.weight", torch.ones(4, 64))),
    (
        "foreign_key_scheme:megatron",
        rename("self_attn.q_proj.lora_A", "self_attention.linear_qkv.adapter.linear_in"),
    ),
    (
        "foreign_key_scheme:torchtune",
        rename("self_attn.q_proj.lora_A.weight", "attn.q_proj.lora_a.weight"),
    ),
    ("base_mismatch", lambda tensors: {f"lora_unet_{k}": v for k, v in tensors.items()}),
    ("base_mismatch", rename(".layers.1.", ".layers.99.")),
    ("base_mismatch", mapped("lora_A", lambda half: half[:, :32])),
    ("shape_mismatch", mapped("0.self_attn.q_proj.lora_A", lambda half: half[:, :32])),
    ("shape_mismatch", mapped("1.self_attn.v_proj.lora_B", lambda half: half[:, :3])),
    (
        "missing_pair",
        lambda tensors: {k: v for k, v in tensors.items() if k != f"{Q}.lora_B.weight"},
    ),
    ("unknown_module", rename("self_attn.q_proj", "mlp.fc1")),
    ("unmatched_keys", rename("model.layers", "backbone.blocks")),
    ("bad_dtype", mapped("", lambda tensor: tensor.to(torch.int32))),
    ("non_finite", mapped("1.self_attn.v_proj.lora_B", lambda half: half * NAN)),
    ("non_finite", mapped("0.self_attn.v_proj.lora_A", lambda half: half * INF)),
    ("zero_effect", mapped("lora_B", lambda half: half * 0)),
    ("empty_weights", lambda tensors: {}),
    ("empty_weights", mapped("", lambda tensor: torch.empty(0))),
]


@pytest.mark.parametrize(
    ("code", "change"), BAD_TENSORS, ids=[f"{code}-{i}" for i, (code, _) in enumerate(BAD_TENSORS)]
)
def test_tensors_that_do_not_fit_are_refused(
    code: str, change: Change, root: Path, config: ModelConfig
) -> None:
    edit_tensors(root / NAME, change)
    if code == "unknown_module":
        edit_config(root / NAME, {"target_modules": ["fc1", "v_proj"]})
    verdict = judge(root, config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == code


def test_a_rank_over_the_cap_is_refused_with_both_numbers(
    tmp_path: Path, config: ModelConfig
) -> None:
    tiny_adapter(tmp_path / "big", config, r=24)
    verdict = judge(tmp_path, config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == "rank_exceeds_max"
    assert "24" in verdict.message
    assert "16" in verdict.message


FAULTS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "unmatched_keys": lambda t, key: {k if k != key else f"x{k}": v for k, v in t.items()},
    "missing_pair": lambda t, key: {k: v for k, v in t.items() if k != key},
    "shape_mismatch": lambda t, key: {
        k: v if k != key else torch.cat([v, v], dim=1 if "_A" in k else 0) for k, v in t.items()
    },
}


@given(st.data(), st.sampled_from(sorted(FAULTS)))
def test_one_renamed_dropped_or_resized_tensor_is_refused_by_its_own_reason(
    config: ModelConfig, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, code: str
) -> None:
    root = tmp_path_factory.mktemp("fault")
    targets = data.draw(
        st.lists(
            st.sampled_from(["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"]),
            min_size=1,
            unique=True,
        )
    )
    tiny_adapter(root / NAME, config, r=data.draw(st.integers(1, 16)), targets=targets)
    keys = sorted(load_file(root / NAME / "adapter_model.safetensors"))
    key = data.draw(st.sampled_from(keys))
    edit_tensors(root / NAME, lambda tensors: FAULTS[code](tensors, key))
    verdict = judge(root, config)
    assert isinstance(verdict, Refused)
    assert verdict.reason_code == code
