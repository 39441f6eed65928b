"""The cells of the kernels' table: Llama-3.1-8B's modules, ranks, and batches of mixed adapters.

A Bed is an arena of 64 resident adapters of one rank class, all layers of all modules, in pages
dealt out at random; a cell runs on it, rotating over layers, batches and inputs so that weights
come from memory and not from a cache. The batches and the floor are those of the peers' harness.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from replica.engine import sections
from replica.engine.arena import Arena
from replica.engine.kernels.gathered import SHARED, GatheredLora
from replica.engine.kernels.metadata import GatheredMeta
from replica.engine.kernels.tiling import Tiling
from replica.engine.model_config import Group, ModelConfig

SLOTS: Final = 64
PAGE_TOKENS: Final = 16
BF16: Final = torch.bfloat16
LLAMA_8B: Final = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
    eos_token_ids=frozenset(),
)
_APART: Final = tuple(
    Group((module,), group.in_features, (out,))
    for group in LLAMA_8B.groups
    for module, out in zip(group.modules, group.out_features, strict=True)
)
MODULES: Final = {
    "qkv": (LLAMA_8B.groups, 0),
    "o": (LLAMA_8B.groups, 1),
    "gate_up": (LLAMA_8B.groups, 2),
    "down": (LLAMA_8B.groups, 3),
    "q": (_APART, 0),
    "kv": (_APART, 1),
    "gate": (_APART, 4),
}
RankClass = int | str
"""A rank that all adapters have, or `mixed`: of 7, four of rank 8, two of 16, one of 64."""


def ranks_of(rank: RankClass) -> list[int]:
    if rank == "mixed":
        return [(8, 16, 8, 64, 8, 16, 8)[slot % 7] for slot in range(SLOTS)]
    return [int(rank)] * SLOTS


def batch(mix: str, rows: int, seed: int, *, mixed: bool) -> list[int]:
    """The slot of each row. `4x512` is 4 adapters of 512 rows each."""
    dice = random.Random(seed)
    shuffled = list(range(SLOTS))
    dice.shuffle(shuffled)
    if mix == "distinct":
        slots = [shuffled[i % SLOTS] for i in range(rows)]
    elif mix == "same":
        slots = [shuffled[0]] * rows
    elif mix == "zipf":
        slots = [shuffled[i] for i in _zipf(rows, dice)]
    else:
        adapters, length = map(int, mix.split("x"))
        return [shuffled[i % SLOTS] for i in range(adapters) for _ in range(length)]
    return [-1 if mixed and i % 8 == 7 else slot for i, slot in enumerate(slots)]


def _zipf(rows: int, dice: random.Random) -> list[int]:
    """Zipf 1.1 over 500 adapters, on slots in order of first use."""
    weights = [(i + 1) ** -1.1 for i in range(500)]
    order: dict[int, int] = {}
    return [
        order.setdefault(i, len(order) % SLOTS) for i in dice.choices(range(500), weights, k=rows)
    ]


@dataclass(frozen=True, slots=True)
class Cell:
    module: str
    rank: RankClass
    rows: int
    mix: str

    @property
    def group(self) -> Group:
        groups, index = MODULES[self.module]
        return groups[index]

    @property
    def prefill(self) -> bool:
        return self.rows > 256

    @property
    def max_rank(self) -> int:
        return 64 if self.rank == "mixed" else int(self.rank)

    @property
    def shared(self) -> bool:
        """What an engine would tell its launches of this batch."""
        if self.prefill:
            return False
        slots = batch(self.mix, self.rows, 1000 * self.rows, mixed=self.rank == "mixed")
        return self.rows >= SHARED * len(set(slots) - {-1})

    def name(self) -> str:
        return f"{self.module} r{self.rank} {self.rows} {self.mix}"


class Bed:
    """Random weights of one rank class behind the section tables."""

    def __init__(self, rank: RankClass, *, contiguous: bool = False) -> None:
        self.rank = rank
        ranks = ranks_of(rank)
        self.max_rank = max(ranks)
        width = sections.page_elements(LLAMA_8B, PAGE_TOKENS)
        modules = sections.slices(LLAMA_8B)
        layouts = [
            sections.lay_out(((r,) * modules,) * LLAMA_8B.num_layers, LLAMA_8B, width)
            for r in ranks
        ]
        pages = sum(layout.pages for layout in layouts)
        self.arena = Arena(
            config=LLAMA_8B,
            pages=pages,
            page_tokens=PAGE_TOKENS,
            slots=SLOTS,
            max_rank=self.max_rank,
            dtype=BF16,
            device=torch.device("cuda"),
        )
        self.arena.pool.normal_(0, 0.05)
        deal = list(range(pages))
        if not contiguous:
            random.Random(0).shuffle(deal)
        for slot, layout in enumerate(layouts):
            own, deal = deal[: layout.pages], deal[layout.pages :]
            table = torch.full(self.arena.sections.shape[1:], -1, dtype=torch.int64)
            places = torch.tensor([each[:4] for each in layout.sections]).unbind(1)
            table[places] = torch.tensor(
                [own[each.page] * width + each.at for each in layout.sections]
            )
            self.arena.sections[slot] = table.cuda()
            self.arena.ranks[slot] = ranks[slot]
        self._loras: dict[bool, GatheredLora] = {}

    def lora(self, groups: Sequence[Group]) -> GatheredLora:
        apart = len(groups) == len(_APART)
        if apart not in self._loras:
            self._loras[apart] = GatheredLora(self.arena, groups, self.max_rank)
        return self._loras[apart]

    def matrices(self, slot: int, layer: int, module: int) -> tuple[Tensor, Tensor]:
        """A and Bt of a module in float64."""
        K, N = _APART[module].in_features, _APART[module].out_features[0]
        rank, flat = int(self.arena.ranks[slot, layer, module]), self.arena.pool.view(-1)
        sides = []
        for side, width in ((0, K), (1, N)):
            starts = self.arena.sections[slot, layer, module, side].tolist()
            tiles = [
                flat[start : start + min(16, rank - 16 * tile) * width].view(-1, width)
                for tile, start in enumerate(starts[: sections.tiles(rank)])
            ]
            sides.append(torch.cat(tiles).double())
        return sides[0], sides[1]


class Work:
    """One cell on its bed, ready to be called."""

    def __init__(self, bed: Bed, cell: Cell, *, calls: int = 320) -> None:
        self.bed, self.cell = bed, cell
        groups, self.index = MODULES[cell.module]
        self.lora = bed.lora(groups)
        self.group = cell.group
        K, N, slices = self.group.in_features, sum(self.group.out_features), len(self.group.modules)
        self._first = sum(len(group.modules) for group in groups[: self.index])
        ranks = ranks_of(bed.rank)
        widest = 2 * max(ranks) * (slices * K + N)
        self.layers = max(2, min(32, math.ceil(400e6 / (SLOTS * widest))))
        count = 16 if cell.rows <= 8 else 6
        mixed = bed.rank == "mixed"
        self.batches = [
            batch(cell.mix, cell.rows, 1000 * cell.rows + i, mixed=mixed) for i in range(count)
        ]
        per_rank = slices * K + N
        self.bytes = self.flops = 0.0
        for slots in self.batches:
            used = [slot for slot in slots if slot >= 0]
            weights = sum(2 * ranks[slot] * per_rank for slot in set(used))
            self.bytes += (weights + len(used) * (2 * K + 4 * N)) / count
            self.flops += sum(2 * ranks[slot] * per_rank for slot in used) / count
        self.calls = max(4, min(calls, math.ceil(160e6 / max(self.bytes, 1))))
        self.metas = [self.meta(slots) for slots in self.batches]
        dice = torch.Generator(device="cuda").manual_seed(7)
        inputs = max(2, min(8, self.calls))
        self.xs = [
            torch.randn(cell.rows, K, device="cuda", dtype=BF16, generator=dice)
            for _ in range(inputs)
        ]
        self.ys = [
            torch.randn(cell.rows, N, device="cuda", dtype=BF16, generator=dice)
            for _ in range(inputs)
        ]
        torch.cuda.synchronize()

    def meta(self, slots: list[int]) -> GatheredMeta:
        meta = self.lora.meta(self.cell.rows, shared=self.cell.shared)
        meta.update(torch.tensor(slots, dtype=torch.int32, device="cuda"))
        return meta

    def call(self, i: int, cut: Tiling | None = None) -> None:
        meta = self.metas[(i // self.layers) % len(self.metas)]
        x, y = self.xs[i % len(self.xs)], self.ys[i % len(self.ys)]
        self.lora.add(x, y, i % self.layers, self.index, meta, cut)

    @cached_property
    def expected(self) -> Tensor:
        """What call 1 adds to y, in float64."""
        layer, slots = 1 % self.layers, self.batches[0]
        x = self.xs[1 % len(self.xs)].double()
        delta = torch.zeros(self.ys[0].shape, dtype=torch.float64, device="cuda")
        for slot in sorted(set(slots) - {-1}):
            rows = torch.tensor([i for i, each in enumerate(slots) if each == slot], device="cuda")
            for part, (start, end) in enumerate(self.group.columns):
                A, Bt = self.bed.matrices(slot, layer, self._first + part)
                delta[rows, start:end] = (x[rows] @ A.t()) @ Bt
        return delta

    def error(self, cut: Tiling | None = None) -> float:
        """||y - y'|| / ||what was added||; rows without adapter must not change at all."""
        y = self.ys[1 % len(self.ys)]
        y.normal_()  # timing has added to it many times
        before = y.clone()
        self.call(1, cut)
        torch.cuda.synchronize()
        gap = (y.double() - (before.double() + self.expected)).norm() / self.expected.norm()
        base = [i for i, slot in enumerate(self.batches[0]) if slot < 0]
        same = torch.equal(y[base], before[base])
        return float(gap) if same else math.inf
