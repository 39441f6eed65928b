"""Matrices laid out for the CPU's product: the same numbers, and only where that is quicker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from replica.engine.packed import PackedMatrix, available
from replica.engine.quantised import Fp8Matrix, Quantization, product
from replica.engine.tiny import tiny_model
from replica.engine.weights import load_base

needs_packing = pytest.mark.skipif(not available(), reason="this torch packs no matrices here")


@needs_packing
@given(
    rows=st.integers(0, 70),
    out=st.integers(1, 130),
    width=st.integers(1, 130),
    biased=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_a_packed_product_is_the_plain_one(
    rows: int, out: int, width: int, biased: bool, seed: int
) -> None:
    """For any shape: also those that its blocks do not divide, and a step without rows."""
    dice = torch.Generator().manual_seed(seed)
    x, W = torch.randn(rows, width, generator=dice), torch.randn(out, width, generator=dice)
    bias = torch.randn(out, generator=dice) if biased else None
    y = product(x, PackedMatrix.of(W), bias)
    assert y.shape == (rows, out)
    torch.testing.assert_close(y, product(x, W, bias), rtol=1e-5, atol=1e-4)


@needs_packing
def test_a_product_into_which_adapters_add_is_its_own_memory() -> None:
    W, x = PackedMatrix.of(torch.randn(8, 16)), torch.randn(3, 16)
    first = product(x, W, None)
    kept = first.clone()
    first[1:, 2:5].add_(1)
    assert torch.equal(product(x, W, None), kept)


@needs_packing
@pytest.mark.parametrize("tied", [True, False])
def test_a_base_is_packed_in_float32_and_its_embedding_is_not(tied: bool, tmp_path: Path) -> None:
    tiny_model(tmp_path, tied=tied)
    packed = load_base(tmp_path, torch.float32, "cpu", packed=True)
    plain = load_base(tmp_path, torch.float32, "cpu")
    assert all(isinstance(W, PackedMatrix) for layer in packed.layers for W in layer.groups)
    assert torch.equal(packed.embed, plain.embed)
    x = torch.randn(2, plain.config.hidden_size)
    torch.testing.assert_close(product(x, packed.head, None), product(x, plain.head, None))


def test_other_types_stay_plain_and_eight_bits_stay_eight_bits(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    narrow = load_base(tmp_path, torch.bfloat16, "cpu", packed=True)
    assert all(isinstance(W, torch.Tensor) for layer in narrow.layers for W in layer.groups)
    small = load_base(tmp_path, torch.float32, "cpu", packed=True, quantization=Quantization.FP8)
    assert all(isinstance(W, Fp8Matrix) for layer in small.layers for W in layer.groups)
