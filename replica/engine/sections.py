"""Sections: how an adapter lies in pages of the pool. Arithmetic only; the memory is the arena's.

An adapter is a list of sections. A section is one rank tile (at most `TILE` ranks wide) of one side
of one slice, a slice being one module of one layer:

    A side    [w, in]    rows of A
    B side    [w, out]   rows of Bt = scaling * B^T

with w = min(TILE, r - TILE * tile) for the module's own rank r: nothing is padded to a cap, and a
module of rank 0 has none. Laws:

- A section is contiguous and lies within one page; it begins on a multiple of `_ALIGN` elements.
- Order is layer, group, side, slice, tile. So the A tiles of a group, which have one length, lie
  under one another wherever they share a page, and so do the Bt tiles of a slice: each is one
  matrix. A section goes to the first page that has room: small ones fill what large ones leave.
- In host memory the sections follow one another in the same order, without pages. Equal ranks give
  equal layouts, so where matrices are cut depends on the adapter alone, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from replica.engine.model_config import Group, ModelConfig

TILE: Final = 16
_ALIGN: Final = 64  # elements: 128 bytes of the 16-bit types, a line of any cache

A_SIDE: Final = 0
B_SIDE: Final = 1

Ranks = tuple[tuple[int, ...], ...]
"""[layer][slice]: a rank for each module, in the order of the groups; 0 where it is not adapted."""


class Section(NamedTuple):
    layer: int
    slice: int
    side: int
    tile: int
    rows: int
    columns: int
    host: int  # where it begins in the adapter's packed elements
    page: int  # of the adapter's own, counted from 0
    at: int  # where in that page


class Run(NamedTuple):
    """Sections that follow one another in host memory and in a page: one copy."""

    host: int
    page: int
    at: int
    elements: int


@dataclass(frozen=True, slots=True)
class Layout:
    sections: tuple[Section, ...]
    runs: tuple[Run, ...]
    pages: int


def slices(config: ModelConfig) -> int:
    """Modules of a layer."""
    return sum(len(group.modules) for group in config.groups)


def first_slice(config: ModelConfig, group: int) -> int:
    """Where the slices of a group begin among those of its layer."""
    return sum(len(each.modules) for each in config.groups[:group])


def tiles(rank: int) -> int:
    return -(-rank // TILE)


def page_elements(config: ModelConfig, page_tokens: int) -> int:
    """A page holds keys and values of `page_tokens` tokens, of all layers."""
    return page_tokens * config.num_layers * 2 * config.num_kv_heads * config.head_dim


def require_fit(config: ModelConfig, page_tokens: int, max_rank: int) -> None:
    """Raises ValueError, with the page size that would do, when a section may exceed a page."""
    widest = max(max(group.in_features, *group.out_features) for group in config.groups)
    largest = min(TILE, max_rank) * widest
    if largest > page_elements(config, page_tokens):
        enough = -(-largest // page_elements(config, 1))
        raise ValueError(
            f"page_tokens: a page of {page_tokens} tokens is smaller than {min(TILE, max_rank)} "
            f"ranks of this base's widest module ({widest}); set it to at least {enough}"
        )


def pages_of(ranks: Ranks, config: ModelConfig, page_elements: int) -> int:
    """Whole pages that an adapter of these ranks takes."""
    return lay_out(ranks, config, page_elements).pages


def packed_elements(ranks: Ranks, config: ModelConfig) -> int:
    """What an adapter of these ranks takes in host memory."""
    sections = in_order(ranks, config)
    return sections[-1].host + _aligned(sections[-1]) if sections else 0


@lru_cache(maxsize=256)
def in_order(ranks: Ranks, config: ModelConfig) -> tuple[Section, ...]:
    """The sections as they lie in host memory; their pages mean nothing."""
    return tuple(_in_order(ranks, config))


@lru_cache(maxsize=256)
def lay_out(ranks: Ranks, config: ModelConfig, page_elements: int) -> Layout:
    """Raises ValueError when a section exceeds a page (see `require_fit`)."""
    rooms: list[int] = []  # what is left in each page
    placed: list[Section] = []
    specs = in_order(ranks, config)
    smallest = min(map(_aligned, specs), default=0)
    first = 0  # no page before it has room for anything
    for section in specs:
        size = _aligned(section)
        if section.rows * section.columns > page_elements:
            raise ValueError(f"a section of {size} elements exceeds a page of {page_elements}")
        while first < len(rooms) and rooms[first] < smallest:
            first += 1
        fits = (page for page in range(first, len(rooms)) if rooms[page] >= size)
        page = next(fits, len(rooms))
        if page == len(rooms):
            rooms.append(page_elements)
        placed.append(section._replace(page=page, at=page_elements - rooms[page]))
        rooms[page] = max(0, rooms[page] - size)  # the last one's padding may lie outside
    return Layout(tuple(placed), tuple(_runs(placed)), len(rooms))


def _runs(sections: list[Section]) -> Iterator[Run]:
    begun: Run | None = None
    for each in sections:
        size = each.rows * each.columns
        if begun is not None and (begun.page, each.host - begun.host) == (
            each.page,
            each.at - begun.at,
        ):
            begun = begun._replace(elements=each.host - begun.host + size)
            continue
        if begun is not None:
            yield begun
        begun = Run(each.host, each.page, each.at, size)
    if begun is not None:
        yield begun


def _in_order(ranks: Ranks, config: ModelConfig) -> Iterator[Section]:
    at = 0
    bounds = tuple(pairwise(accumulate((len(g.modules) for g in config.groups), initial=0)))
    for layer, of_layer in enumerate(ranks):
        for (start, end), group in zip(bounds, config.groups, strict=True):
            for section in _of_group(layer, start, of_layer[start:end], group):
                yield section._replace(host=at)
                at += _aligned(section)


def _of_group(layer: int, start: int, ranks: tuple[int, ...], group: Group) -> Iterator[Section]:
    for side in (A_SIDE, B_SIDE):
        for index, rank in enumerate(ranks):
            columns = group.in_features if side == A_SIDE else group.out_features[index]
            for tile in range(tiles(rank)):
                rows = min(TILE, rank - TILE * tile)
                yield Section(layer, start + index, side, tile, rows, columns, 0, 0, 0)


def _aligned(section: Section) -> int:
    return -(-section.rows * section.columns // _ALIGN) * _ALIGN
