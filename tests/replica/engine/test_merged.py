"""An adapter folded into the base against the same adapter beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, load, pool_pages

from replica.core.step import BASE_SLOT
from replica.engine.adapter_store import AdapterFolder
from replica.engine.model_config import ModelConfig
from replica.engine.runner import Runner
from replica.engine.tiny import tiny_adapter, tiny_model
from replica.engine.weights import load_base
from shared.ids import AdapterId

TOLERANCE = 1e-4
"""Largest difference of a logit in float32, of logits up to about 10."""

NAMES = {"qv": ("q_proj", "v_proj"), "all": ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("merged")
    model = tiny_model(root / "base", family="qwen2")
    for seed, (name, targets) in enumerate(NAMES.items(), start=1):
        tiny_adapter(root / "adapters" / name, model, seed=seed, r=5, targets=targets)
    return root


def _runner(home: Path, name: str, dtype: str, *, merged: bool) -> tuple[Runner, int]:
    """A runner that serves the adapter one way or the other, and the slot to name."""
    config = ModelConfig.from_dir(home / "base")
    host = AdapterFolder(home / "adapters", 64, config).read(AdapterId(name))
    runner = Runner(
        base_dir=home / "base",
        dtype=dtype,
        slots=1,
        max_rank=64,
        pages=pool_pages(32, 1),
        page_tokens=16,
        merged=host if merged else None,
    )
    if not merged:
        load(runner, 0, host, 32)
    return runner, BASE_SLOT if merged else 0


def _logits(home: Path, name: str, dtype: str, *, merged: bool) -> torch.Tensor:
    runner, slot = _runner(home, name, dtype, merged=merged)
    driver = Driver(runner, pages=32, page_tokens=16)
    driver.add("a", range(3, 33), slot)
    return driver.logits()["a"]


@pytest.mark.parametrize("name", NAMES)
def test_merged_logits_are_those_of_the_adapter_beside_the_base(home: Path, name: str) -> None:
    one, other = (_logits(home, name, "float32", merged=merged) for merged in (True, False))
    assert (one - other).abs().max() < TOLERANCE
    base = _runner(home, name, "float32", merged=False)[0]
    driver = Driver(base, pages=32, page_tokens=16)
    driver.add("a", range(3, 33))
    assert (one - driver.logits()["a"]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_merged_greedy_text_is_that_of_the_adapter_beside_the_base(home: Path, name: str) -> None:
    texts = []
    for merged in (True, False):
        runner, slot = _runner(home, name, "float32", merged=merged)
        driver = Driver(runner, pages=32, page_tokens=16)
        for at in range(3):
            driver.add(str(at), range(3 + at, 20 + at), slot)
        texts.append(driver.generate(24))
    assert texts[0] == texts[1]


def test_in_bfloat16_the_sum_is_rounded_once(home: Path) -> None:
    """The merged matrix is the nearest to the exact sum: not that of two rounded terms."""
    config = ModelConfig.from_dir(home / "base")
    host = AdapterFolder(home / "adapters", 64, config).read(AdapterId("all"))
    exact, rounded = (
        load_base(home / "base", dtype, "cpu", merged=host)
        for dtype in (torch.float32, torch.bfloat16)
    )
    for one, other in zip(exact.layers, rounded.layers, strict=True):
        for wide, narrow in zip(one.groups, other.groups, strict=True):
            assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize("rank", [1, 16, 33])
def test_a_folded_matrix_is_the_base_and_scaling_times_b_times_a(rank: int, tmp_path: Path) -> None:
    """Through tiles of sixteen ranks, and nothing of modules that the adapter leaves alone."""
    from safetensors.torch import load_file

    config = tiny_model(tmp_path / "base")
    tiny_adapter(tmp_path / "ada", config, seed=1, r=rank, targets=("k_proj", "up_proj"), alpha=6)
    host = AdapterFolder(tmp_path, 64, config).read(AdapterId("ada"))
    raw = load_file(tmp_path / "base" / "model.safetensors")
    lora = load_file(tmp_path / "ada" / "adapter_model.safetensors")
    folded = load_base(tmp_path / "base", torch.float32, "cpu", merged=host)
    for layer, weights in enumerate(folded.layers):
        for group, W in zip(config.groups, weights.groups, strict=True):
            for module, (start, end) in zip(group.modules, group.columns, strict=True):
                name = f"model.layers.{layer}.{module}"
                expected = raw[f"{name}.weight"]
                A = lora.get(f"base_model.model.{name}.lora_A.weight")
                if A is not None:
                    B = lora[f"base_model.model.{name}.lora_B.weight"]
                    expected = expected + 6 / rank * B @ A
                torch.testing.assert_close(W[start:end], expected)
