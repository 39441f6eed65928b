"""Mixed: steps that carry prompts, as one graph a number of tokens reads them.

Such a graph has places for tokens, for rows of one token, for blocks of longer stretches and for
draws. What a step has fewer of is padding. Padding names the last column, which is never anybody's:
so a graph of n columns holds n - 1 tokens. Its buffers stay, in one piece for one copy:

    columns [5, tokens] (`feed.py`) · singles [rows] · firsts, counts [blocks] · last [rows]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from replica.core.step import Row
from replica.engine.cuda import feed

SIZES: Final = (64, *range(128, 1281, 128))
"""Tokens that steps are padded to. The host takes up to 25 ms to launch a step kernel by kernel,
which is as long as a device takes for the largest of these; beyond them nothing is gained."""

_STRETCHES_MAX: Final = 32
"""Rows of more than one token in a step that is captured."""

_ALIGN: Final = 4


class Inputs(NamedTuple):
    columns: Tensor
    singles: Tensor
    firsts: Tensor
    counts: Tensor
    last: Tensor


class _Shape(NamedTuple):
    tokens: int
    rows: int
    blocks: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return (feed.COLUMNS * self.tokens, self.rows, self.blocks, self.blocks, self.rows)


class Mixed:
    def __init__(
        self,
        *,
        sizes: Sequence[int],
        max_running: int,
        max_step_tokens: int,
        block: int,
        device: torch.device,
    ) -> None:
        """`block` tokens of one sequence are a block. No size is larger than steps are."""
        most = _aligned(max_step_tokens + 1, 16)
        self.sizes = sorted({min(size, most) for size in sizes})
        self._block = block
        self._shapes: dict[int, _Shape] = {}
        self._buffers: dict[int, Tensor] = {}
        for size in self.sizes:
            rows, blocks = min(size, max_running), size // block + _STRETCHES_MAX
            self._shapes[size] = _Shape(size, _aligned(rows, _ALIGN), _aligned(blocks, _ALIGN))
            self._buffers[size] = torch.from_numpy(self._pack(size, (), (), {})).to(device)

    def buffer(self, size: int) -> Tensor:
        """[1, numbers], of which `inputs` are parts."""
        return self._buffers[size][None]

    def inputs(self, size: int) -> Inputs:
        columns, *lists = self._buffers[size].split(self._shapes[size].lengths)
        return Inputs(columns.view(feed.COLUMNS, -1), *lists)

    def pack(
        self, size: int, rows: Sequence[Row], seats: Sequence[int], drawn: Mapping[str, int]
    ) -> np.ndarray | None:
        """What goes into `buffer`; None for a step that it cannot hold, or whose prompts are to be
        scored."""
        stretches = sum(len(row.tokens) > 1 for row in rows)
        if stretches > _STRETCHES_MAX or any(row.targets for row in rows):
            return None
        return self._pack(size, rows, seats, drawn)[None]

    def _pack(
        self, size: int, rows: Sequence[Row], seats: Sequence[int], drawn: Mapping[str, int]
    ) -> np.ndarray:
        tokens = sum(len(row.tokens) for row in rows)
        assert tokens < size, "the last column is nobody's"
        lists = feed.work(rows, self._block, tokens)
        out = np.full(sum(self._shapes[size].lengths), size - 1, dtype=np.int32)
        columns, single, firsts, counts, last = np.split(
            out, np.cumsum(self._shapes[size].lengths)[:-1]
        )
        columns[:] = feed.mixed(rows, seats, drawn, size).ravel()
        counts[:] = 0
        for to, numbers in zip((single, firsts, counts, last), lists, strict=True):
            to[: len(numbers)] = numbers
        return out


def _aligned(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
