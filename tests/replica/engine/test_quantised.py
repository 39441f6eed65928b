"""Eight-bit weights: how far they are from full ones, and what they leave alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, load, pool_pages
from hypothesis import given
from hypothesis import strategies as st

from replica.core.step import BASE_SLOT
from replica.engine.adapter_store import AdapterFolder
from replica.engine.lora import LoraLinear
from replica.engine.model_config import Group, ModelConfig
from replica.engine.quantised import E4M3_MAX, Fp8Matrix, Quantization, product
from replica.engine.runner import Runner
from replica.engine.tiny import tiny_adapter, tiny_model
from replica.engine.weights import load_base
from shared.ids import AdapterId

DIVERGENCE = 0.02
"""Most that the mean KL of a tiny random base's next tokens may be, in nats, full to FP8."""


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 40),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
    seed=st.integers(0, 1 << 30),
)
def test_a_weight_is_off_by_a_sixteenth_of_itself_or_next_to_nothing(
    rows: int, columns: int, scale: float, seed: int
) -> None:
    W = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    W[0] = 0
    kept = Fp8Matrix.of(W)
    off = (kept.widened(torch.float32) - W).abs()
    assert (off <= W.abs() / 16 + kept.scales * 2**-10).all()
    assert torch.equal(kept.widened(torch.float32)[0], W[0])
    assert kept.values.float().abs().max() <= E4M3_MAX


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3000, 700), (8, 16)], ids=["many blocks", "one block"])
def test_the_product_is_that_of_the_widened_matrix(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    dice = torch.Generator().manual_seed(3)
    rows, columns = shape
    W = Fp8Matrix.of(torch.randn(rows, columns, generator=dice) / columns**0.5)
    x, bias = torch.randn(5, columns, generator=dice).to(dtype), torch.ones(rows, dtype=dtype)
    whole = x @ W.widened(dtype).t() + bias
    close = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(product(x, W, bias), whole, rtol=close, atol=close)


def test_memory_is_a_quarter_of_float32(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    full = load_base(tmp_path, torch.float32, "cpu")
    small = load_base(tmp_path, torch.float32, "cpu", quantization=Quantization.FP8)
    for layer, other in zip(full.layers, small.layers, strict=True):
        for W, kept in zip(layer.groups, other.groups, strict=True):
            assert isinstance(W, torch.Tensor)
            assert isinstance(kept, Fp8Matrix)
            assert kept.values.element_size() == 1
            assert kept.size_bytes == W.numel() + 4 * W.shape[0]
    assert torch.equal(full.embed, small.embed)
    assert torch.equal(full.head, small.head)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantised")
    model = tiny_model(root / "base", hidden=128, layers=3)
    tiny_adapter(root / "adapters" / "ada", model, seed=1, r=8)
    return root


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_next_tokens_are_nearly_those_of_the_full_base(home: Path, dtype: str) -> None:
    """With and without adapter, in mixed batches."""
    config = ModelConfig.from_dir(home / "base")
    host = AdapterFolder(home / "adapters", 64, config).read(AdapterId("ada"))
    rows = []
    for quantization in Quantization:
        runner = Runner(
            base_dir=home / "base",
            dtype=dtype,
            slots=1,
            max_rank=64,
            pages=pool_pages(32, 1),
            page_tokens=16,
            quantization=quantization,
        )
        load(runner, 0, host, 32)
        driver = Driver(runner, pages=32, page_tokens=16)
        for at in range(4):
            driver.add(str(at), range(3 + at, 23 + 5 * at), (0, BASE_SLOT)[at % 2])
        rows.append(torch.stack(list(driver.logits().values())).log_softmax(-1))
    full, small = rows
    divergence = (full.exp() * (full - small)).sum(-1).mean()
    assert 0 < divergence < DIVERGENCE


def test_adapters_see_the_same_input_beside_either_base() -> None:
    """Their term is what it would be beside full weights, to the last bit that float32 keeps."""

    class Beside:
        def add(
            self, x: torch.Tensor, y: torch.Tensor, layer: int, index: int, group: Group
        ) -> None:
            seen.append(x)

    seen: list[torch.Tensor] = []
    x, W = torch.randn(4, 32), torch.randn(16, 32)
    group = Group(("o",), 32, (16,))
    for kept in (W, Fp8Matrix.of(W)):
        LoraLinear(kept, None, group, 0, 0)(x, Beside())
    assert seen[0] is seen[1] is x


def test_a_device_with_arithmetic_of_its_own_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from replica.engine import quantised

    x, W = torch.randn(2, 8), Fp8Matrix.of(torch.randn(4, 8))
    answer = torch.ones(2, 4)
    monkeypatch.setitem(quantised.PRODUCTS, "cpu", lambda x, W, bias: answer)
    assert product(x, W, None) is answer
