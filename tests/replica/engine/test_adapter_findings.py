"""All faults of an upload at once: the first is the replica's own, none follows from another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft_upload import PREFIX, upload
from safetensors.torch import load_file
from variants import VARIANTS, Base, Variant

from replica.adapter_check import check
from replica.engine.tiny import tiny_model

Q, V = (f"{PREFIX}model.layers.0.self_attn.{module}_proj" for module in "qv")


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture(scope="module")
def base(base_dir: Path) -> Base:
    return Base(tiny_model(base_dir, seed=2), load_file(base_dir / "model.safetensors"))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_first_error_is_what_a_replica_says(
    variant: Variant, base: Base, base_dir: Path, tmp_path: Path
) -> None:
    variant.make(base).write(tmp_path / "upload")
    found = check(tmp_path / "upload", base=base_dir, max_rank=64, dtype="float32")
    errors = [each["code"] for each in found["findings"] if each["level"] == "error"]
    assert errors[:1] == ([] if variant.code is None else [variant.code])
    assert found["servable"] == (variant.code is None)
    assert all(each["message"] for each in found["findings"])
    nameless = check(tmp_path / "upload", base=None, max_rank=64, dtype="float32")
    assert nameless["servable"] is not True


def test_every_fault_is_found_and_none_follows_from_another(
    base: Base, base_dir: Path, tmp_path: Path
) -> None:
    made = upload(base.config, targets=("q_proj", "v_proj", "o_proj"))
    assert made.config is not None
    made.config |= {"use_dora": True, "lora_alpha": "16", "r": 0, "init_lora_weights": "pissa"}
    made.tensors[f"{Q}.lora_magnitude_vector"] = torch.ones(64)
    del made.tensors[f"{V}.lora_B.weight"]
    made.write(tmp_path / "upload")
    found = check(tmp_path / "upload", base=base_dir, max_rank=64, dtype="float32")
    assert [each["code"] for each in found["findings"]] == [
        "requires_modified_base:pissa",
        "unsupported_feature:use_dora",
        "bad_config:r",
        "bad_config:lora_alpha",
        "unsupported_feature:use_dora",
        "missing_pair",
    ]


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"target_modules": ["q_proj", "v_proj", "fc1"]}, "target_without_weights"),
        ({"task_type": "SEQ_2_SEQ_LM"}, "task_type"),
        ({"base_model_name_or_path": "unsloth/x-bnb-4bit"}, "quantised_base"),
        ({"base_model_name_or_path": "/kaggle/input/x"}, "base_is_a_path"),
        ({"base_model_name_or_path": None}, "base_unnamed"),
    ],
)
def test_oddities_are_said_of_what_is_served(
    config: dict[str, object], code: str, base: Base, base_dir: Path, tmp_path: Path
) -> None:
    made = upload(base.config)
    assert made.config is not None
    made.config |= config
    made.write(tmp_path / "upload")
    found = check(tmp_path / "upload", base=base_dir, max_rank=64, dtype="float32")
    assert [(each["level"], each["code"]) for each in found["findings"]] == [("warning", code)]
    assert found["servable"]
