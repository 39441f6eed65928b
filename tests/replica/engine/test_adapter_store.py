"""Adapters that must load, and their versions."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from uploads import MAX_RANK, NAME, edit_config, edit_tensors, judge, rename

from replica.engine.adapter_store import AdapterFolder, BadAdapter, Found, Refused
from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_adapter
from shared.ids import AdapterId


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True},
        {"lora_alpha": 1.6},
        {"rank_pattern": None, "alpha_pattern": {}},
        {"alpha_pattern": {"q_proj": 3}},
        {"rank_pattern": {r"layers\.\d+\.self_attn\.(q|v)_proj": 4}, "r": 8},
        {"fan_in_fan_out": True},
        {"modules_to_save": []},
        {"target_modules": r"(?:.*?(?:language|text).*?(?:q_proj|v_proj).*?)"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "q_proj", "v_proj", "v_projo_proj", "fc1"]},
        {"target_modules": [f"layers.{i}.self_attn.{m}_proj" for i in (0, 1) for m in "qv"]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"init_lora_weights": "gaussian", "corda_config": None, "eva_config": {"rho": 2}},
        {"peft_version": "0.19.0", "use_bdlora": None, "brand_new_field": False, "newer": []},
        {"enable_lora": None, "merge_weights": False},
        {"task_type": None},
        {"task_type": "FEATURE_EXTRACTION"},
        {"base_model_name_or_path": None, "revision": "unsloth"},
        {"base_model_name_or_path": "../../../kaggle/working/model"},
        {"base_model_name_or_path": "unsloth/some-base-bnb-4bit"},
        {"megatron_core": "megatron.core", "loftq_config": {}, "runtime_config": {"a": False}},
    ],
    ids=lambda changes: ",".join(changes),
)  # fmt: skip
def test_harmless_configs_load(changes: dict[str, Any], root: Path, config: ModelConfig) -> None:
    edit_config(root / NAME, changes)
    assert isinstance(judge(root, config), Found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.", "base_model.model._orig_mod."),
        ("base_model.model.", "module.base_model.model."),
        (".layers.", ".layers._fsdp_wrapped_module."),
        ("_A.weight", "_A.default.weight"),
        ("model.model.layers", "model.model.language_model.layers"),
        ("model.model.layers", "model.language_model.model.layers"),
    ],
)
def test_residue_in_names_is_seen_through(
    old: str, new: str, root: Path, config: ModelConfig
) -> None:
    folder = AdapterFolder(root, MAX_RANK, config)
    plain = folder.read(NAME)
    both = rename("_B.weight", "_B.default.weight") if "default" in new else lambda t: t
    edit_tensors(root / NAME, lambda tensors: both(rename(old, new)(tensors)))
    assert torch.equal(folder.read(NAME).flat, plain.flat)


def test_files_beside_the_weights_are_never_opened(root: Path, config: ModelConfig) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(root / "exploded"),))

    for name in ("training_args.bin", "optimizer.pt", "adapter_model.bin", "scheduler.pt"):
        (root / NAME / name).write_bytes(pickle.dumps(Bomb()))
    (root / NAME / "added_tokens.json").write_text("{not json")
    (root / NAME / "chat_template.jinja").write_text("{{ 1/0 }}")
    folder = AdapterFolder(root, MAX_RANK, config)
    assert isinstance(folder.scan()[0], Found)
    folder.read(NAME)
    assert not (root / "exploded").exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_float_kinds_are_cast(dtype: torch.dtype, root: Path, config: ModelConfig) -> None:
    edit_tensors(root / NAME, lambda tensors: {k: v.to(dtype) for k, v in tensors.items()})
    assert AdapterFolder(root, MAX_RANK, config).read(NAME).flat.dtype == torch.float32
    assert AdapterFolder(root, MAX_RANK, config, "bfloat16").read(NAME).flat.dtype == torch.bfloat16


def test_rank_and_size_are_true_not_the_cap(tmp_path: Path, config: ModelConfig) -> None:
    recipe: dict[str, Any] = {"r": 2, "targets": ("q_proj", "down_proj")}
    tiny_adapter(tmp_path / "mixed", config, **recipe, rank_pattern={"down_proj": 5})
    found = judge(tmp_path, config)
    assert isinstance(found, Found)
    elements = 2 * (2 * (64 + 64) + 5 * (128 + 64))  # two layers, every matrix at its own rank
    assert (found.rank, found.size_bytes) == (5, elements * 4)
    host = AdapterFolder(tmp_path, MAX_RANK, config).read(AdapterId("mixed"))
    assert (host.rank, host.size_bytes, host.digest) == (5, found.size_bytes, found.digest)
    assert host.ranks[1] == (2, 0, 0, 0, 0, 0, 5)


def _digest(root: Path, config: ModelConfig) -> str:
    verdict = judge(root, config)
    assert isinstance(verdict, Found)
    return verdict.digest


@pytest.mark.parametrize(
    "changes",
    [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}],
    ids=lambda changes: ",".join(changes),
)
def test_what_changes_the_output_changes_the_digest(
    changes: dict[str, Any], root: Path, config: ModelConfig
) -> None:
    before = _digest(root, config)
    edit_config(root / NAME, changes)
    assert _digest(root, config) != before


def test_what_does_not_keeps_it(root: Path, config: ModelConfig) -> None:
    before = _digest(root, config)
    edit_config(root / NAME, {"base_model_name_or_path": "elsewhere", "lora_dropout": 0.3})
    os.utime(root / NAME / "adapter_model.safetensors", (1, 1))
    (root / NAME).rename(root / "other")
    assert _digest(root, config) == before


def test_new_weights_under_the_old_name_are_a_new_version(root: Path, config: ModelConfig) -> None:
    folder = AdapterFolder(root, MAX_RANK, config)
    (before,) = folder.scan()
    assert folder.scan()[0] is before  # nothing was read again
    tiny_adapter(root / NAME, config, seed=4)
    assert isinstance(before, Found)
    assert folder.read(NAME).digest != before.digest
    (after,) = folder.scan()
    assert isinstance(after, Found)
    assert after.digest == folder.read(NAME).digest


def test_a_repaired_folder_is_served_and_a_deleted_one_forgotten(
    root: Path, config: ModelConfig
) -> None:
    folder = AdapterFolder(root, MAX_RANK, config)
    (root / NAME / "adapter_model.safetensors").write_bytes(b"abc")
    assert isinstance(folder.scan()[0], Refused)
    tiny_adapter(root / NAME, config, seed=3)
    assert isinstance(folder.scan()[0], Found)
    for file in (root / NAME).iterdir():
        file.unlink()
    (root / NAME).rmdir()
    assert folder.scan() == []


def test_weights_too_large_for_the_engine_are_refused(root: Path, config: ModelConfig) -> None:
    edit_tensors(root / NAME, lambda tensors: {k: v * 1e6 for k, v in tensors.items()})
    with pytest.raises(BadAdapter, match="non_finite"):
        AdapterFolder(root, MAX_RANK, config, "float16").read(NAME)


def test_oddities_of_what_is_served_are_logged_once(
    root: Path, config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(root / NAME, {"base_model_name_or_path": "unsloth/x-bnb-4bit"})
    folder = AdapterFolder(root, MAX_RANK, config)
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert isinstance(folder.scan()[0], Found)
    assert [getattr(record, "code", None) for record in caplog.records] == ["quantised_base"]
