"""The CUDA engine's kernels against torch: in Triton's interpreter, or on a GPU.

The interpreter must be chosen before triton is imported; so without a GPU they run in a process of
their own: this file again, with TRITON_INTERPRET set.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 4e-2}

needs_triton = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="runs in its own process, below"
)


def _close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        ours.float().cpu(), expected.float().cpu(), rtol=1e-2, atol=TOLERANCE[ours.dtype]
    )


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=dice).to(dtype).to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 576])
def test_add_norm_adds_and_then_norms(dtype: torch.dtype, width: int) -> None:
    from replica.engine.cuda.norm import add_norm
    from replica.engine.cuda.product import Product
    from replica.engine.model import rms_norm

    h, delta = _random(5, width, dtype=dtype), _random(5, width, dtype=dtype, seed=1)
    weight = _random(width, dtype=dtype, seed=2)
    both = h + delta
    y = add_norm(h, Product(delta), weight, 1e-5).x
    assert torch.equal(h, both)
    _close(y, rms_norm(both, weight, 1e-5))
    _close(add_norm(h, None, weight, 1e-5).x, rms_norm(both, weight, 1e-5))
    assert torch.equal(h, both)


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="its float8 is off by up to half")
def test_rows_in_float8_are_the_rows_to_a_sixteenth() -> None:
    from replica.engine.cuda.norm import add_norm, quantise

    x = _random(4, 200, dtype=torch.float32)
    rows = quantise(x)
    assert rows.x is x
    assert rows.x8 is not None
    assert rows.scale is not None
    torch.testing.assert_close(rows.x8.float() * rows.scale, x, rtol=1 / 16, atol=1e-2)
    normed = add_norm(x, None, torch.ones(200, device=DEVICE), 1e-5, quantised=True)
    assert normed.x8 is not None
    assert normed.scale is not None
    torch.testing.assert_close(normed.x8.float() * normed.scale, normed.x, rtol=1 / 16, atol=1e-2)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_is_silu_times_up(dtype: torch.dtype) -> None:
    from replica.engine.cuda.activation import gated
    from replica.engine.cuda.product import Product

    gate_up = _random(3, 2 * 1100, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    _close(gated(Product(gate_up)), silu(gate) * up)


@needs_triton
def test_scales_that_are_left_to_the_reader_are_applied_by_it() -> None:
    from replica.engine.cuda.activation import gated
    from replica.engine.cuda.norm import add_norm
    from replica.engine.cuda.product import Product
    from replica.engine.cuda.rotate import rotate, rotations

    def scaled(raw: Tensor) -> tuple[Product, Tensor]:
        rows = torch.rand(raw.shape[0], 1, device=DEVICE) + 0.5
        columns = torch.rand(1, raw.shape[1], device=DEVICE) + 0.5
        return Product(raw.clone(), rows, columns), raw * rows * columns

    product, y = scaled(_random(3, 80, dtype=torch.float32))
    _close(gated(product), gated(Product(y)))
    _close(product.settle(), y)
    product, y = scaled(_random(3, 48, dtype=torch.float32))
    ones = torch.ones(48, device=DEVICE)
    h = _random(3, 48, dtype=torch.float32, seed=1)
    _close(add_norm(h.clone(), product, ones, 1e-5).x, add_norm(h, Product(y), ones, 1e-5).x)
    paged = Paged([0], [3], torch.float32)
    product, y = scaled(paged.qkv)
    table = rotations(torch.rand(D // 2, device=DEVICE), 1.0, 8)
    kept = [paged.kv.clone(), paged.kv.clone()]
    for each, kv in zip((product, Product(y)), kept, strict=True):
        rotate(each, kv, paged.places, table, None, 1e-5)
    _close(product.raw[:, : HEADS * D], y[:, : HEADS * D])
    _close(kept[0].nan_to_num(9), kept[1].nan_to_num(9))


HEADS, KV_HEADS, D, PAGE = 6, 2, 24, 4


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs them one after another."""
    if INTERPRETED:
        from replica.engine.cuda import decode

        monkeypatch.setattr(decode, "_PROGRAMS", 20)


class Paged:
    """Sequences in scattered pages of one layer of a pool, with poison where nobody wrote."""

    def __init__(self, contexts: list[int], new: list[int], dtype: torch.dtype) -> None:
        from replica.engine.cuda.places import Places

        self.contexts, self.new = contexts, new
        ends = [c + n for c, n in zip(contexts, new, strict=True)]
        width = max(-(-end // PAGE) for end in ends)
        pages = torch.randperm(len(ends) * width + 3, generator=torch.Generator().manual_seed(1))
        self.poison = int(pages[-1])
        self.tables = pages[: len(ends) * width].view(len(ends), width).int().to(DEVICE)
        pool = torch.full((len(pages), 2, 2, PAGE, KV_HEADS, D), float("nan"), dtype=dtype)
        self.kv = pool.to(DEVICE)[:, 1]  # the second of two layers
        self.qkv = _random(sum(new), (HEADS + 2 * KV_HEADS) * D, dtype=dtype)
        self.keys = [_random(2, end, KV_HEADS, D, dtype=dtype, seed=9 + end) for end in ends]
        for table, kv in zip(self.tables, self.keys, strict=True):
            for position in range(kv.shape[1]):
                page = int(table[position // PAGE])
                self.kv[page, :, position % PAGE] = kv[:, position]
        positions = [p for c, n in zip(contexts, new, strict=True) for p in range(c, c + n)]
        seats = [seat for seat, n in enumerate(new) for _ in range(n)]
        self.places = Places(self.tables, _ints(seats), _ints(positions))

    def release(self, window: int | None) -> None:
        """Where no token sees it, a table names poison."""
        for table, context in zip(self.tables, self.contexts, strict=True):
            if window is not None:
                table[: max(0, context + 1 - window) // PAGE] = self.poison

    def expected(self, window: int | None) -> Tensor:
        out, at = [], 0
        for context, n, (k, v) in zip(self.contexts, self.new, self.keys, strict=True):
            q = self.qkv[at : at + n, : HEADS * D].view(n, HEADS, D).transpose(0, 1)
            k, v = (x.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
            behind = torch.arange(context, context + n)[:, None] - torch.arange(context + n)
            seen = (behind >= 0) & (behind < (window or 1 << 30))
            o = scaled_dot_product_attention(q, k, v, attn_mask=seen.to(DEVICE))
            out.append(o.transpose(0, 1).reshape(n, -1))
            at += n
        return torch.cat(out)


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("contexts", [[0, 3, 63, 64, 200], [130]], ids=str)
def test_rows_of_one_token_attend_to_their_context(
    contexts: list[int], window: int | None, dtype: torch.dtype
) -> None:
    from replica.engine.cuda.decode import attend_rows

    paged = Paged(contexts, [1] * len(contexts), dtype)
    paged.release(window)
    out = torch.full((len(contexts), HEADS * D), float("nan"), dtype=dtype, device=DEVICE)
    rows = _ints(list(range(len(contexts))))
    attend_rows(paged.qkv, paged.kv, out, paged.places, rows, window)
    _close(out, paged.expected(window))


@needs_triton
def test_one_split_and_many_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from replica.engine.cuda import decode

    paged = Paged([200, 7], [1, 1], torch.float32)
    for splits in (1, 2, 8):
        monkeypatch.setattr(decode, "splits_for", lambda rows, heads, n=splits: n)
        out = torch.empty(2, HEADS * D, device=DEVICE)
        decode.attend_rows(paged.qkv, paged.kv, out, paged.places, _ints([0, 1]), None)
        _close(out, paged.expected(None))


@needs_triton
def test_a_padding_row_attends_to_nothing() -> None:
    from replica.engine.cuda.decode import attend_rows

    paged = Paged([5, 5], [1, 1], torch.float32)
    paged.places.positions[1] = -1
    out = torch.full((2, HEADS * D), float("nan"), device=DEVICE)
    attend_rows(paged.qkv, paged.kv, out, paged.places, _ints([0, 1]), None)
    assert torch.equal(out[1], torch.zeros(HEADS * D, device=DEVICE))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_stretches_attend_to_what_stands_before_them(
    window: int | None, dtype: torch.dtype
) -> None:
    from replica.engine.cuda.prefill import attend_stretches, tokens_a_block

    paged = Paged([0, 65, 9], [40, 33, 1], dtype)
    paged.release(window)
    size, blocks, at = tokens_a_block(HEADS, KV_HEADS), [], 0
    for n in paged.new:
        blocks += [(at + i, min(size, n - i)) for i in range(0, n, size)]
        at += n
    out = torch.full((at, HEADS * D), float("nan"), dtype=dtype, device=DEVICE)
    firsts, counts = (_ints(list(column)) for column in zip(*blocks, strict=True))
    attend_stretches(paged.qkv, paged.kv, out, paged.places, (firsts, counts), window)
    _close(out, paged.expected(window))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_normed_turned_and_kept(normed: bool, dtype: torch.dtype) -> None:
    from replica.engine.cuda.product import Product
    from replica.engine.cuda.rotate import rotate, rotations
    from replica.engine.model import rms_norm, rotate_

    paged = Paged([0, 6], [3, 2], dtype)
    paged.places.positions[3] = -1
    frequencies = torch.rand(D // 2, device=DEVICE)
    table = rotations(frequencies, 1.5, 64)
    heads = paged.qkv.clone().view(5, -1, D)
    norms = _random(HEADS + KV_HEADS, D, dtype=dtype, seed=5) if normed else None
    turning = heads[:, : HEADS + KV_HEADS].float()
    if norms is not None:
        turning = rms_norm(heads[:, : HEADS + KV_HEADS], norms, 1e-5).float()
    angles = torch.tensor([0, 1, 2, 6, 7], device=DEVICE)[:, None] * frequencies
    cos, sin = angles.cos() * 1.5, angles.sin() * 1.5
    rotate_(turning, (torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]))
    before, kv = paged.qkv.clone(), paged.kv.clone()
    rotate(Product(paged.qkv), paged.kv, paged.places, table, norms, 1e-5)
    ours = paged.qkv.view(5, -1, D)
    for token in (0, 1, 2, 4):
        seat, position = int(paged.places.seats[token]), int(paged.places.positions[token])
        page = int(paged.tables[seat, position // PAGE])
        place = paged.kv[page, :, position % PAGE]
        _close(ours[token, :HEADS], turning[token, :HEADS])
        _close(place[0], turning[token, HEADS:])
        assert torch.equal(place[1], heads[token, HEADS + KV_HEADS :])
        kv[page, :, position % PAGE] = place
    assert torch.equal(paged.qkv[3], before[3]), "a padding token is not touched"
    assert torch.equal(kv.nan_to_num(9), paged.kv.nan_to_num(9)), "written outside its place"


@needs_triton
def test_the_likeliest_token_is_the_lowest_of_equals_and_broken_rows_have_none() -> None:
    from replica.engine.cuda.greedy import greedy

    z = _random(6, 20_000, dtype=torch.float32)
    z[1, 19_999] = 50
    z[2, [7, 13_000]] = 60
    z[3, 100], z[4, 19_998], z[5, 2] = float("nan"), float("inf"), float("-inf")
    tokens = torch.empty(6, dtype=torch.int32, device=DEVICE)
    greedy(z, tokens)
    assert tokens.tolist() == [int(z[0].argmax()), 19_999, 7, -1, -1, -1]
    small = _random(2, 11, dtype=torch.float32) - 5
    greedy(small, tokens[:2])
    assert tokens[:2].tolist() == small.argmax(-1).tolist()


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the process it starts")
def test_the_kernels_equal_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-n0", "--no-header"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "26 passed" in done.stdout, done.stdout[-300:]
