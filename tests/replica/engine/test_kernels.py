"""The gathered product: the reference against the definition, the Triton pair against both.

Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before triton is
imported; so they run in a process of their own: this file again, with TRITON_INTERPRET set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from replica.core.segments import Segments
from replica.core.step import BASE_SLOT
from replica.engine import kernels
from replica.engine.arena import Arena
from replica.engine.host_adapter import HostAdapter, Pair, pack
from replica.engine.kernels.reference import ReferencePlan
from replica.engine.model_config import ModelConfig
from shared.ids import AdapterId

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    eos_token_ids=frozenset(),
)
MODULES = [module for group in CONFIG.groups for module in group.modules]


@dataclass
class Resident:
    """What is in a slot, as PEFT has it."""

    pairs: dict[tuple[int, str], Pair]
    host: HostAdapter


def _resident(seed: int, ranks: Sequence[int], dtype: torch.dtype) -> Resident:
    """An adapter with `ranks[i]` in module i of each layer; 0 leaves it out."""
    dice = torch.Generator().manual_seed(seed)
    pairs: dict[tuple[int, str], Pair] = {}
    for layer in range(CONFIG.num_layers):
        at = 0
        for group in CONFIG.groups:
            for module, out in zip(group.modules, group.out_features, strict=True):
                if rank := ranks[at]:
                    shrinks = torch.randn(rank, group.in_features, generator=dice) / 7
                    expands = torch.randn(out, rank, generator=dice) / 4
                    pairs[layer, module] = (shrinks, expands, 0.5 + seed)
                at += 1
    return Resident(pairs, pack(AdapterId(f"a{seed}"), "", CONFIG, pairs, dtype))


def _arena(residents: Sequence[Resident | None], dtype: torch.dtype, device: str) -> Arena:
    arena = Arena(
        config=CONFIG,
        pages=64,
        page_tokens=16,
        slots=len(residents),
        max_rank=64,
        dtype=dtype,
        device=torch.device(device),
    )
    scattered = [page * 37 % 64 for page in range(64)]
    for slot, resident in enumerate(residents):
        if resident is not None:
            pages = [scattered.pop() for _ in range(arena.pages_of(resident.host))]
            arena.place(slot, resident.host, pages)
    return arena


def _segments(runs: Sequence[tuple[int, int]]) -> Segments:
    starts = [0]
    for _, length in runs:
        starts.append(starts[-1] + length)
    return Segments(tuple(starts), tuple(slot for slot, _ in runs))


def _by_definition(
    x: Tensor, y: Tensor, layer: int, index: int, segments: Segments, slots: list[Resident]
) -> Tensor:
    """y_i + s (x_i A^T) B^T, one row at a time, in float64."""
    y, group = y.double(), CONFIG.groups[index]
    for start, end, slot in zip(segments.starts, segments.starts[1:], segments.slots, strict=False):
        for row in range(start, end):
            for module, (first, last) in zip(group.modules, group.columns, strict=True):
                if slot != BASE_SLOT and (layer, module) in slots[slot].pairs:
                    shrinks, expands, scaling = slots[slot].pairs[layer, module]
                    v = shrinks.double() @ x[row].double()
                    y[row, first:last] += scaling * (expands.double() @ v)
    return y


RANKS = ([4] * 7, [1, 0, 3, 0, 16, 0, 64], [0, 8, 0, 5, 0, 0, 0], [33, 2, 17, 9, 1, 24, 6])
RUNS = st.lists(st.tuples(st.integers(BASE_SLOT, len(RANKS) - 1), st.integers(1, 20)), min_size=1)


@given(RUNS.map(lambda runs: runs[:5]), st.integers(0, 1), st.integers(0, 3))
def test_the_reference_is_the_definition(
    runs: list[tuple[int, int]], layer: int, index: int
) -> None:
    slots = [_resident(seed, ranks, torch.float32) for seed, ranks in enumerate(RANKS)]
    segments, group = _segments(runs), CONFIG.groups[index]
    dice = torch.Generator().manual_seed(segments.starts[-1])
    x = torch.randn(segments.starts[-1], group.in_features, generator=dice)
    y = torch.randn(segments.starts[-1], sum(group.out_features), generator=dice)
    expected = _by_definition(x, y, layer, index, segments, slots)
    plan = kernels.plan(segments, _arena(slots, torch.float32, "cpu"))
    if plan is not None:
        plan.add(x, y, layer, index, group)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)


def test_rows_without_adapter_are_not_touched_at_all() -> None:
    slots = [_resident(seed, ranks, torch.float32) for seed, ranks in enumerate(RANKS)]
    segments, group = _segments([(BASE_SLOT, 3), (3, 2), (BASE_SLOT, 4)]), CONFIG.groups[0]
    x = torch.randn(9, group.in_features)
    y = torch.randn(9, sum(group.out_features))
    before = y.clone()
    ReferencePlan.of(segments, _arena(slots, torch.float32, "cpu")).add(x, y, 0, 0, group)
    assert torch.equal(y[:3], before[:3])
    assert torch.equal(y[5:], before[5:])
    assert not torch.equal(y[3:5], before[3:5])


def test_a_step_of_base_rows_has_no_plan() -> None:
    arena = _arena([_resident(0, RANKS[0], torch.float32)], torch.float32, "cpu")
    assert kernels.plan(_segments([(BASE_SLOT, 5)]), arena) is None


def test_an_empty_or_impossible_slot_is_an_error_never_the_base() -> None:
    arena = _arena([None, _resident(0, RANKS[0], torch.float32)], torch.float32, "cpu")
    for slot in (0, 2, -2):
        with pytest.raises(ValueError, match="slot"):
            kernels.plan(_segments([(slot, 1)]), arena)
    for slot in (-1, 2):
        with pytest.raises(ValueError, match="no slot"):
            arena.clear(slot)


def test_an_adapter_over_the_slots_rank_is_not_placed() -> None:
    arena = _arena([None], torch.float32, "cpu")
    with pytest.raises(ValueError, match="rank 65"):
        arena.place(0, _resident(0, [65] * 7, torch.float32).host, [0])


def test_packing_pads_no_rank() -> None:
    host = _resident(3, RANKS[3], torch.float32).host
    pairs = _resident(3, RANKS[3], torch.float32).pairs.values()
    exact = sum(shrinks.numel() + expands.numel() for shrinks, expands, _ in pairs)
    assert exact <= host.flat.numel() <= exact + 64 * 2 * 2 * 7 * 3  # alignment only
    assert host.rank == 33


# The Triton pair: in the interpreter, or on a GPU ---------------------------------------------

needs_triton = pytest.mark.skipif(
    not INTERPRETED and DEVICE == "cpu", reason="runs in its own process, below"
)

LAYOUTS = {
    "one row": [(0, 1)],
    "a chunk and one more": [(3, 17)],
    "all slots and none": [(BASE_SLOT, 2), (0, 1), (1, 5), (2, 3), (3, 1), (BASE_SLOT, 1)],
    "the same slot twice": [(1, 2), (BASE_SLOT, 1), (1, 3)],
}


CASES = [(layout, torch.float32) for layout in LAYOUTS]
CASES += [("all slots and none", torch.float16)]
if not INTERPRETED:  # whose dot multiplies the bits of a bfloat16 as if they were integers
    CASES += [(layout, torch.bfloat16) for layout in LAYOUTS]


@needs_triton
@pytest.mark.parametrize(("layout", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("index", range(4))
def test_triton_equals_the_reference(layout: str, index: int, dtype: torch.dtype) -> None:
    from replica.engine.kernels.gathered import TritonPlan

    slots = [_resident(seed, ranks, dtype) for seed, ranks in enumerate(RANKS)]
    segments, group = _segments(LAYOUTS[layout]), CONFIG.groups[index]
    tokens = segments.starts[-1]
    dice = torch.Generator().manual_seed(index)
    x = torch.randn(tokens, group.in_features, generator=dice).to(dtype)
    y = torch.randn(tokens, sum(group.out_features), generator=dice).to(dtype)
    expected = y.float().clone()
    ReferencePlan.of(segments, _arena(slots, torch.float32, "cpu")).add(
        x.float(), expected, 1, index, group
    )
    ours, on = y.to(DEVICE, copy=True), x.to(DEVICE)
    TritonPlan.of(segments, _arena(slots, dtype, DEVICE)).add(on, ours, 1, index, group)
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    torch.testing.assert_close(ours.float().cpu(), expected, rtol=0, atol=tolerance)
    base = [
        row
        for slot, start, end in zip(
            segments.slots, segments.starts, segments.starts[1:], strict=False
        )
        if slot == BASE_SLOT
        for row in range(start, end)
    ]
    assert torch.equal(ours.cpu()[base], y[base])


@needs_triton
def test_a_chunk_of_slot_minus_one_writes_nothing() -> None:
    from replica.engine.kernels.gathered import TritonPlan

    arena = _arena([_resident(0, RANKS[0], torch.float32)], torch.float32, DEVICE)
    none = torch.tensor([BASE_SLOT], dtype=torch.int32, device=DEVICE)
    chunks = (torch.zeros_like(none), torch.full_like(none, 4), none)
    group = CONFIG.groups[0]
    x = torch.randn(4, group.in_features, device=DEVICE)
    y = torch.randn(4, sum(group.out_features), device=DEVICE)
    before = y.clone()
    TritonPlan(chunks, arena, rank_max=4).add(x, y, 0, 0, group)
    assert torch.equal(y, before)


@pytest.mark.skipif(INTERPRETED, reason="this is the process it starts")
def test_the_triton_pair_equals_the_reference_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-k", "triton_equals or minus_one"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "21 passed" in done.stdout
