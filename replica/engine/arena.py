"""Arena: the engine's device memory. One pool of equal pages for keys, values and adapters.

    pool [pages + 1, page_elements]                                          all there is
    kv   [pages + 1, layers, 2, page_tokens, kv_heads, head_dim]             the same memory

The token at offset o of page p has its key of layer l in kv[p, l, 0, o] and its value in
kv[p, l, 1, o]. A page that an adapter owns holds sections instead (`sections.py`), and two tables
say where, for kernels that get them with the pool and know nothing else:

    sections [slots, layers, slices, 2, tiles]   int64, first element in pool.view(-1); -1 is none
    ranks    [slots, layers, slices]             int32, the slice's own rank; 0 is not adapted

A slot is a row of these tables and reserves no memory. Who owns which page is decided elsewhere
(`core/pages.py`); here a page is written when told to be.

One page more than the pool has stays zero for ever: block tables are padded with it. A page is
zeroed when a sequence first enters it, so nothing that was left there (not even NaN, which a mask
does not stop) reaches another sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from replica.engine import sections
from replica.engine.host_adapter import HostAdapter
from replica.engine.model_config import ModelConfig
from replica.engine.sections import A_SIDE, Layout, Ranks, Section


@dataclass(frozen=True, slots=True)
class LoraPart:
    """One adapter's share of one group of one layer, as matrices that lie in the pool.

    Side by side the columns of v = x Aᵀ are the ranks of the group's slices, in order.
    """

    A: tuple[Tensor, ...]  # [rows, in] each; under one another they are all R ranks
    Bt: tuple[tuple[int, int, int, Tensor], ...]
    """(r, c0, c1, [rows, c1 - c0]):  y[:, c0:c1] += v[:, r : r + rows] Bt."""


LayerParts = tuple[LoraPart | None, ...]
"""One a group, in the order of ModelConfig.groups; None where the adapter does nothing."""


class Arena:
    def __init__(
        self,
        *,
        config: ModelConfig,
        pages: int,
        page_tokens: int,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ValueError when adapters are to be served and a section may exceed a page."""
        if slots:
            sections.require_fit(config, page_tokens, max_rank)
        self.config = config
        self.page_tokens = page_tokens
        self.page_elements = sections.page_elements(config, page_tokens)
        self.zero_page = pages
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.pool = torch.zeros(pages + 1, self.page_elements, dtype=dtype, device=device)
        self.kv = self.pool.view(
            pages + 1, config.num_layers, 2, page_tokens, config.num_kv_heads, config.head_dim
        )
        table = (slots, config.num_layers, sections.slices(config))
        shape = (*table, 2, sections.tiles(max_rank))
        self.sections = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(table, dtype=torch.int32, device=device)
        self._placed: list[_Placed | None] = [None] * slots

    def enter(self, pages: Sequence[int]) -> None:
        """Zero pages that sequences write to for the first time."""
        if pages:
            self.pool.index_fill_(0, torch.tensor(pages, device=self.device), 0)

    def pages_of(self, host: HostAdapter) -> int:
        """How many pages `place` wants for it."""
        return sections.pages_of(host.ranks, self.config, self.page_elements)

    def place(self, slot: int, host: HostAdapter, pages: Sequence[int]) -> None:
        """Copy an adapter into pages it owns from now on, and name them in the slot's tables."""
        self._index(slot)
        self.fill(host, pages)
        self.name(slot, host, pages)

    def fill(
        self, host: HostAdapter, pages: Sequence[int], among: Collection[int] | None = None
    ) -> None:
        """The first half: copy it into its pages, or into those of them that are `among`."""
        if host.rank > self.max_rank or len(host.ranks) != self.config.num_layers:
            raise ValueError(
                f"{host.adapter}: rank {host.rank} over {len(host.ranks)} layers does not fit a "
                f"slot of rank {self.max_rank} and {self.config.num_layers} layers"
            )
        layout = sections.lay_out(host.ranks, self.config, self.page_elements)
        if len(pages) != layout.pages:
            raise ValueError(f"{host.adapter} takes {layout.pages} pages, not {len(pages)}")
        memory = self.pool.view(-1)
        for run in layout.runs:
            if among is not None and pages[run.page] not in among:
                continue
            start = pages[run.page] * self.page_elements + run.at
            source = host.flat[run.host : run.host + run.elements]
            memory[start : start + run.elements].copy_(source, non_blocking=True)

    def name(self, slot: int, host: HostAdapter, pages: Sequence[int]) -> None:
        """The second: from now on the slot's tables say that it lies there."""
        index = self._index(slot)
        layout = sections.lay_out(host.ranks, self.config, self.page_elements)
        self._placed[index] = _Placed(host.ranks, layout, tuple(pages))
        ranks = torch.tensor(host.ranks, dtype=torch.int32)
        self.sections[index].copy_(self._sent(self._table(host.ranks, pages)), non_blocking=True)
        self.ranks[index].copy_(self._sent(ranks), non_blocking=True)

    def clear(self, slot: int) -> None:
        """Forget what the slot names. Its pages are left as they are."""
        index = self._index(slot)
        self.sections[index] = -1
        self.ranks[index] = 0
        self._placed[index] = None

    def parts(self, slot: int) -> tuple[LayerParts, ...]:
        """The adapter in a slot as matrices: views into the pool, made once after it was placed."""
        placed = self._resident(slot)
        if placed.parts is None:
            placed.parts = self._views(placed)
        return placed.parts

    def require(self, slots: Iterable[int]) -> None:
        """Raises ValueError unless there is an adapter in each of them."""
        for slot in slots:
            self._resident(slot)

    def rank(self, slot: int) -> int:
        """The largest rank of the adapter in a slot."""
        return max(map(max, self._resident(slot).ranks))

    def _resident(self, slot: int) -> _Placed:
        """An empty slot is an error: its row would be served as the base."""
        placed = self._placed[self._index(slot)]
        if placed is None:
            raise ValueError(f"slot {slot} is empty, yet a row of this step uses it")
        return placed

    def _index(self, slot: int) -> int:
        if not 0 <= slot < len(self._placed):  # Python would take -1 for the last one
            raise ValueError(f"no slot {slot}: there are {len(self._placed)}")
        return slot

    def _sent(self, table: Tensor) -> Tensor:
        """Where a copy to the device that nobody waits for may begin."""
        return table.pin_memory() if self.device.type == "cuda" else table

    def _start(self, section: Section, pages: Sequence[int]) -> int:
        return pages[section.page] * self.page_elements + section.at

    def _table(self, ranks: Ranks, pages: Sequence[int]) -> Tensor:
        table = torch.full(self.sections.shape[1:], -1, dtype=torch.int64)
        cells, own, at = _cells(ranks, self.config, self.page_elements, table.shape[-1])
        owned = torch.tensor(pages, dtype=torch.int64)
        table.view(-1)[cells] = owned[own] * self.page_elements + at
        return table

    def _views(self, placed: _Placed) -> tuple[LayerParts, ...]:
        columns = [span for group in self.config.groups for span in group.columns]
        bounds = [sections.first_slice(self.config, i) for i in range(len(self.config.groups))]
        of_layer: list[list[list[Section]]] = [[[] for _ in bounds] for _ in placed.ranks]
        for each in placed.layout.sections:
            group = sum(each.slice >= bound for bound in bounds) - 1
            of_layer[each.layer][group].append(each)
        return tuple(
            tuple(self._part(group, placed, columns) if group else None for group in groups)
            for groups in of_layer
        )

    def _part(
        self, group: list[Section], placed: _Placed, columns: Sequence[tuple[int, int]]
    ) -> LoraPart:
        A: list[Tensor] = []
        Bt: list[tuple[int, int, int, Tensor]] = []
        rank = 0
        for first, rows in _joined(group):
            start = self._start(first, placed.pages)
            view = self.pool.view(-1)[start : start + rows * first.columns]
            view = view.view(rows, first.columns)
            if first.side == A_SIDE:
                A.append(view)
            else:
                Bt.append((rank, *columns[first.slice], view))
                rank += rows
        return LoraPart(tuple(A), tuple(Bt))


@lru_cache(maxsize=256)
def _cells(
    ranks: Ranks, config: ModelConfig, page_elements: int, tiles: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For each section its cell in a slot's flat table, which of the adapter's pages, and where."""
    layout = sections.lay_out(ranks, config, page_elements)
    width = sections.slices(config)
    rows = [
        (
            ((each.layer * width + each.slice) * 2 + each.side) * tiles + each.tile,
            each.page,
            each.at,
        )
        for each in layout.sections
    ]
    columns = torch.tensor(rows, dtype=torch.int64).view(-1, 3).unbind(1)
    return columns[0].contiguous(), columns[1].contiguous(), columns[2].contiguous()


@dataclass(slots=True)
class _Placed:
    """What is in a slot."""

    ranks: Ranks
    layout: Layout
    pages: tuple[int, ...]
    parts: tuple[LayerParts, ...] | None = None


def _joined(group: list[Section]) -> list[tuple[Section, int]]:
    """Sections of one side that lie under one another, as the first of them and all their rows."""
    joined: list[tuple[Section, int]] = []
    for each in group:
        if joined:
            first, rows = joined[-1]
            of_one = first.side == each.side and (each.side == A_SIDE or first.slice == each.slice)
            end = (first.page, first.at + rows * first.columns)
            if of_one and end == (each.page, each.at):
                joined[-1] = (first, rows + each.rows)
                continue
        joined.append((each, each.rows))
    return joined
