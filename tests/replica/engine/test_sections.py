"""How adapters lie in pages: nothing overlaps, nothing straddles, nothing is reserved."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.engine.model_config import ModelConfig
from replica.engine.sections import (
    A_SIDE,
    TILE,
    Ranks,
    lay_out,
    packed_elements,
    page_elements,
    pages_of,
    require_fit,
    tiles,
)

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    eos_token_ids=frozenset(),
)
SMALL = replace(
    LLAMA_8B,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=12,
)
RANK = st.one_of(st.just(0), st.integers(1, 256))
RANKS = st.lists(st.lists(RANK, min_size=7, max_size=7).map(tuple), min_size=2, max_size=2).map(
    tuple
)


@given(RANKS, st.integers(14, 60))
def test_sections_partition_an_adapter_and_share_pages_without_overlap(
    ranks: Ranks, page_tokens: int
) -> None:
    size = page_elements(SMALL, page_tokens)
    layout = lay_out(ranks, SMALL, size)
    spans: dict[int, list[tuple[int, int]]] = {}
    exact = 0
    for each in layout.sections:
        elements = each.rows * each.columns
        exact += elements
        assert each.rows == min(TILE, ranks[each.layer][each.slice] - TILE * each.tile) > 0
        assert 0 <= each.at <= size - elements, "a section straddles pages"
        spans.setdefault(each.page, []).append((each.at, each.at + elements))
    wanted = {
        (layer, module, side, tile)
        for layer, of_layer in enumerate(ranks)
        for module, rank in enumerate(of_layer)
        for side in (0, 1)
        for tile in range(tiles(rank))
    }
    assert {each[:4] for each in layout.sections} == wanted
    assert sorted(spans) == list(range(layout.pages)), "a page is taken for nothing"
    for within in spans.values():
        within.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(within))
    assert exact <= packed_elements(ranks, SMALL)
    copied = sum(run.elements for run in layout.runs)
    assert exact <= copied <= packed_elements(ranks, SMALL), "runs hold sections and their padding"


def _uniform(rank: int) -> Ranks:
    return ((rank,) * 7,) * LLAMA_8B.num_layers


@pytest.mark.parametrize(("rank", "mebibytes"), [(1, 5), (8, 40), (16, 80), (64, 320), (256, 1280)])
def test_an_adapter_takes_its_own_rank_and_less_than_a_tenth_more(
    rank: int, mebibytes: int
) -> None:
    """Rank 16 on all modules of an 8B base is 80 MiB in 16 bits, in pages of 2 MiB."""
    size = page_elements(LLAMA_8B, 16)
    assert size * 2 == 2 << 20
    assert packed_elements(_uniform(rank), LLAMA_8B) * 2 == mebibytes << 20
    pages = pages_of(_uniform(rank), LLAMA_8B, size)
    assert mebibytes <= 2 * pages <= mebibytes * 1.1 + 2


def test_the_tiles_of_a_group_lie_under_one_another() -> None:
    layout = lay_out(_uniform(16), LLAMA_8B, page_elements(LLAMA_8B, 16))
    first = [each for each in layout.sections if each.layer == 0 and each.side == A_SIDE]
    assert [each.at for each in first[:3]] == [0, 16 * 4096, 2 * 16 * 4096]


def test_a_page_smaller_than_a_section_is_refused_with_the_size_that_would_do() -> None:
    require_fit(LLAMA_8B, 4, 256)
    with pytest.raises(ValueError, match="set it to at least 4"):
        require_fit(LLAMA_8B, 3, 256)
    require_fit(LLAMA_8B, 1, 4)
    with pytest.raises(ValueError, match="exceeds a page"):
        lay_out(_uniform(16), LLAMA_8B, page_elements(LLAMA_8B, 3))
