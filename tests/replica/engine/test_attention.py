"""Paged attention against the dense formula, whatever the pages held before."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from engine_driver import GREEDY
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from replica.core.pages import RELEASED
from replica.core.step import BASE_SLOT, Row
from replica.engine.arena import Arena
from replica.engine.attention import AttentionPlan
from replica.engine.model_config import ModelConfig
from replica.engine.tiny import tiny_model

PAGES, PAGE_TOKENS = 96, 4


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Three query heads to a key head."""
    return tiny_model(tmp_path_factory.mktemp("grouped"), heads=6, kv_heads=2, hidden=48)


def _arena(config: ModelConfig) -> Arena:
    arena = Arena(
        config=config,
        pages=PAGES,
        page_tokens=PAGE_TOKENS,
        slots=0,
        max_rank=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    arena.kv[:PAGES] = math.nan  # what an earlier sequence may have left
    return arena


def _dense(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """q [t, heads, d] at positions start.., k and v [length, kv, d] -> [t, heads * d]."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = torch.einsum("thd,lhd->htl", q, k) / math.sqrt(q.shape[-1])
    keys, queries = torch.arange(k.shape[0]), torch.arange(start, start + q.shape[0])[:, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("htl,lhd->thd", weights, v).flatten(1)


Chunks = list[list[int]]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=7),
    st.integers(1, 50),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_paged_equals_dense_for_any_chunks_pages_and_window(
    grouped: ModelConfig, chunks: Chunks, window: int, everywhere: bool, dice: Random
) -> None:
    """Each list is one sequence's chunk lengths; step i computes every sequence's i-th chunk."""
    sliding = frozenset({0, 1} if everywhere else {1})
    config = replace(grouped, sliding_window=window, sliding_layers=sliding)
    arena = _arena(config)
    free = list(range(PAGES))
    dice.shuffle(free)
    noise = torch.Generator().manual_seed(len(chunks))
    heads = config.num_heads + 2 * config.num_kv_heads
    data = [
        torch.randn(sum(lengths), heads, config.head_dim, generator=noise) for lengths in chunks
    ]
    tables: list[list[int]] = [[] for _ in chunks]
    for i in range(max(map(len, chunks))):
        rows, parts = [], []
        for sequence, lengths in enumerate(chunks):
            if i >= len(lengths):
                continue
            start, end = sum(lengths[:i]), sum(lengths[: i + 1])
            while len(tables[sequence]) * PAGE_TOKENS < end:
                tables[sequence].append(free.pop())
            if everywhere:  # no layer sees further back: what was passed is another's
                passed = max(0, start + 1 - window) // PAGE_TOKENS
                gone = [page for page in tables[sequence][:passed] if page != RELEASED]
                tables[sequence][:passed] = [RELEASED] * passed
                arena.kv[gone] = math.nan
            tokens, pages = (0,) * (end - start), tuple(tables[sequence])
            rows.append(Row(str(sequence), BASE_SLOT, start, tokens, pages, True, GREEDY, drawn=0))
            parts.append(data[sequence][start:end])
        step = torch.cat(parts)
        plan = AttentionPlan.of(rows, arena)
        arena.enter(plan.entered)
        new = step[:, config.num_heads :].unflatten(1, (2, config.num_kv_heads))
        plan.keep(-new, arena.kv, 0)
        plan.keep(new, arena.kv, 1)
        q = step[:, : config.num_heads]
        ours = {window: plan.attend(q, arena.kv, 1, windowed=True)}
        if not everywhere:
            ours[None] = plan.attend(q, arena.kv, 1)
        at = 0
        for row in rows:
            whole = data[int(row.seq)][: row.end]
            q, k, v = (
                whole[row.start :].split(
                    [config.num_heads, config.num_kv_heads, config.num_kv_heads], 1
                )[0],
                *whole.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)[1:],
            )
            for width, attended in ours.items():
                mine, theirs = (
                    attended[at : at + len(row.tokens)],
                    _dense(q, k, v, row.start, width),
                )
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
            at += len(row.tokens)


def test_the_padding_page_stays_zero(grouped: ModelConfig) -> None:
    arena = _arena(grouped)
    rows = [
        Row("long", BASE_SLOT, 20, (0,), tuple(range(6)), True, GREEDY, drawn=0),
        Row("short", BASE_SLOT, 0, (0,), (9,), True, GREEDY, drawn=0),
    ]
    plan = AttentionPlan.of(rows, arena)
    assert plan.entered == (5, 9)
    arena.enter(plan.entered)
    assert not arena.kv[arena.zero_page].any()
    assert arena.kv[0].isnan().all()
    assert not arena.kv[9].any()


def test_a_windowed_layer_gathers_the_window_not_the_context(grouped: ModelConfig) -> None:
    arena = _arena(replace(grouped, sliding_window=6, sliding_layers=frozenset({1})))
    decoding = Row("decodes", BASE_SLOT, 79, (0,), tuple(range(20)), True, GREEDY, drawn=0)
    filling = Row("fills", BASE_SLOT, 40, (0,) * 8, tuple(range(20, 32)), True, GREEDY, drawn=0)
    plan = AttentionPlan.of([decoding, filling], arena)
    pages = [(group.blocks[0] // (2 * arena.config.num_layers)).tolist() for group in plan.windowed]
    assert pages == [[28, 29, 30, 31], [18, 19]]
    assert [group.blocks.shape[1] for group in plan.full] == [12, 20]


def test_a_window_that_no_row_outgrew_costs_nothing(grouped: ModelConfig) -> None:
    arena = _arena(replace(grouped, sliding_window=80, sliding_layers=frozenset({1})))
    row = Row("s", BASE_SLOT, 79, (0,), tuple(range(20)), True, GREEDY, drawn=0)
    plan = AttentionPlan.of([row], arena)
    assert plan.windowed is plan.full
