"""Arena: the engine's device memory. Pages of keys and values, and the adapters in slots.

    kv[layer, page, offset, 0, head] = key,   kv[layer, page, offset, 1, head] = value

of the token at `page * page_tokens + offset`. One page more than the pool has stays zero for ever:
block tables are padded with it. A page is zeroed when a sequence first enters it, so nothing that
was left there (not even NaN, which a mask does not stop) reaches another sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from replica.engine.host_adapter import HostAdapter, LayerParts, LoraPart
from replica.engine.model_config import ModelConfig

SLICES_MAX: Final = 3  # q, k, v
ENTRY_WORDS: Final = 1 + 2 * SLICES_MAX


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
        self.config = config
        self.page_tokens = page_tokens
        self.zero_page = pages
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        shape = (config.num_layers, pages + 1, page_tokens, 2, config.num_kv_heads, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self._slots: list[tuple[LayerParts, ...] | None] = [None] * slots
        groups = len(config.groups)
        self.table = torch.zeros(
            slots, config.num_layers, groups, ENTRY_WORDS, dtype=torch.int64, device=device
        )
        """For kernels: where A lies, the slices' ranks, where their Bt lie; 0 is not adapted."""

    def enter(self, pages: Sequence[int]) -> None:
        """Zero pages that sequences write to for the first time."""
        if pages:
            index = torch.tensor(pages, device=self.device)
            self.kv.index_fill_(1, index, 0)

    def place(self, slot: int, host: HostAdapter) -> None:
        """Copy an adapter into a slot; on a CPU that holds it in the engine's dtype, share it."""
        if host.rank > self.max_rank or len(host.ranks) != self.config.num_layers:
            raise ValueError(
                f"{host.adapter}: rank {host.rank} over {len(host.ranks)} layers does not fit a "
                f"slot of rank {self.max_rank} and {self.config.num_layers} layers"
            )
        index = self._index(slot)
        flat = host.flat.to(device=self.device, dtype=self.dtype)
        parts = host.parts(flat, self.config.groups)
        entries = [[_entry(part) for part in layer] for layer in parts]
        self.table[index] = torch.tensor(entries)
        self._slots[index] = parts

    def clear(self, slot: int) -> None:
        index = self._index(slot)
        self.table[index] = 0
        self._slots[index] = None

    def resident(self, slot: int) -> tuple[LayerParts, ...]:
        """The adapter in a slot. An empty one is an error: its row would be served as the base."""
        parts = self._slots[self._index(slot)]
        if parts is None:
            raise ValueError(f"slot {slot} is empty, yet a row of this step uses it")
        return parts

    def rank(self, slot: int) -> int:
        """The largest rank of the adapter in a slot."""
        return max(max(part.ranks) for layer in self.resident(slot) for part in layer if part)

    def _index(self, slot: int) -> int:
        if not 0 <= slot < len(self._slots):  # Python would take -1 for the last one
            raise ValueError(f"no slot {slot}: there are {len(self._slots)}")
        return slot


def _entry(part: LoraPart | None) -> list[int]:
    if part is None:
        return [0] * ENTRY_WORDS
    none = [0] * (SLICES_MAX - len(part.Bt))
    places = [Bt.data_ptr() for Bt in part.Bt]
    return [part.A.data_ptr(), *part.ranks, *none, *places, *none]
