"""Staging: numbers of a step on their way to the device, from pinned memory, without a wait.

The copy of one step may still be under way while the host writes the next, so buffers go round.
A buffer is written again only when the copy out of it is over; with more buffers than steps under
way that has always happened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ROUND = 8
_ALIGN = 4


class Staging:
    def __init__(self, *, capacity: int, device: torch.device) -> None:
        """`capacity` in int32 numbers a copy, as most have; a larger one makes itself room."""
        self._device = device
        self._buffers = [self._buffer(capacity) for _ in range(_ROUND)]
        self._copied: list[torch.cuda.Event | None] = [None] * _ROUND
        self._turn = 0

    def lists(self, *lists: Sequence[int]) -> list[Tensor]:
        """Lists of any lengths in one copy; each begins where wide loads may."""
        places, at = [], 0
        for each in lists:
            places.append(at)
            at += -(-len(each) // _ALIGN) * _ALIGN
        column = np.zeros(at, dtype=np.int32)
        for place, each in zip(places, lists, strict=True):
            column[place : place + len(each)] = each
        whole = self.send((column,))[0]
        return [whole[place : place + len(each)] for place, each in zip(places, lists, strict=True)]

    def send(
        self, columns: Sequence[Sequence[int] | np.ndarray] | np.ndarray, to: Tensor | None = None
    ) -> Tensor:
        """Equally long columns, one after another: [columns, length] on the device, or in `to`."""
        turn = self._turn = (self._turn + 1) % _ROUND
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        width, length = len(columns), len(columns[0])
        if width * length > len(self._buffers[turn]):
            self._buffers[turn] = self._buffer(2 * width * length)
        source = self._buffers[turn][: width * length].view(width, length)
        for row, column in zip(source.numpy(), columns, strict=True):
            row[:] = column
        if to is None:
            to = torch.empty(width, length, dtype=torch.int32, device=self._device)
        to.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            event = self._copied[turn] = copied or torch.cuda.Event()
            event.record()
        return to

    def _buffer(self, capacity: int) -> Tensor:
        pinned = self._device.type == "cuda"
        return torch.empty(capacity, dtype=torch.int32, pin_memory=pinned)
