"""Machine: what one replica has, what its time costs, and what it costs to rent.

The defaults are one H200 that runs Llama-3.1-8B in bfloat16. Steps are a fit of what
`loraplex bench engine` measured there (`loadtests/results/h200-engine.json`); the copy and disk
rates are what bring an adapter of rank 16 (84 MB) to a slot in 4 ms and to host memory in 150 ms. A
replica reports its own rates once it has loaded something. Prices are examples: give your own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from loadtests.prices import Prices

_PAGE_TOKENS: Final = 16
_FULL: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Bytes, seconds, and money by the hour; of one replica."""

    gpu_bytes: float = 139 * 2**30
    gpu_reserve: float = 0.08  # share of it for activations, graphs and the allocator
    base_bytes: float = 16.06e9
    kv_token_bytes: float = 131_072  # keys and values of one token, all layers
    host_bytes: float = 256e9  # that adapters may have
    copy_bytes_per_s: float = 20e9  # host memory to a slot
    read_bytes_per_s: float = 0.56e9  # disk to host memory
    host_load_s: float = 0.0  # host memory to a slot; 0: by bytes and rate
    disk_load_s: float = 0.0  # disk to host memory; 0: by bytes and rate
    capacity: int = 64  # sequences that run at once
    step_tokens_max: int = 512
    step_s: float = 0.0047
    row_s: float = 0.000024
    prompt_token_s: float = 0.000031
    adapter_s: float = 0.000026
    padded: int = 0  # 1: a slot takes what the highest rank would (vLLM); 0: its adapter's own
    replica_per_hour: float = 3.0
    host_gb_per_hour: float = 0.004

    def changed(self, changes: Iterable[str]) -> Machine:
        """With `NAME=VALUE` in place of what it was. Raises ValueError, naming the names."""
        texts = {}
        for change in changes:
            name, found, value = change.partition("=")
            if not found:
                raise ValueError(f"{change!r}: NAME=VALUE, of {', '.join(_names())}")
            texts[name] = value
        return self.with_values(texts)

    def with_values(self, values: Mapping[str, Any]) -> Machine:
        """Raises ValueError, naming the names."""
        names, new = _names(), {}
        for name, value in values.items():
            if name not in names:
                raise ValueError(f"{name!r} is nothing of a machine: {', '.join(names)}")
            new[name] = names[name](value)
            if not 0 <= new[name] < float("inf"):
                raise ValueError(f"{name}: at least 0, not {value}")
        made = replace(self, **new)
        if made.capacity < 1 or made.step_tokens_max < 1:
            raise ValueError("capacity and step_tokens_max are at least 1")
        for name in ("copy_bytes_per_s", "read_bytes_per_s", "kv_token_bytes", "step_s"):
            if not getattr(made, name):
                raise ValueError(f"{name}: above 0")
        return made

    # -- time

    def copy_s(self, size_bytes: float) -> float:
        return self.host_load_s or size_bytes / self.copy_bytes_per_s

    def read_s(self, size_bytes: float) -> float:
        return self.disk_load_s or size_bytes / self.read_bytes_per_s

    def requests_per_s(
        self, *, prompt_tokens: float, output_tokens: float, adapters: float
    ) -> float:
        """With all places taken all the time, by so many different adapters."""
        full_s = self.step_s + self.row_s * self.capacity + self.adapter_s * adapters
        return 1 / (output_tokens / self.capacity * full_s + self.prompt_token_s * prompt_tokens)

    # -- room

    def free_bytes(self, tokens: float) -> float:
        """Of the GPU, beside the base and keys and values of so many tokens; below 0: too few."""
        usable = self.gpu_bytes * (1 - self.gpu_reserve)
        return usable - self.base_bytes - tokens * self.kv_token_bytes

    def prices(
        self, *, slots: int, host_max: int, size_bytes: float, slot_bytes: float, longest: int
    ) -> Prices:
        """For the simulator: adapters of one size, and the pages that slots leave."""
        pages = int(self.free_bytes(0) - slots * slot_bytes) // int(
            self.kv_token_bytes * _PAGE_TOKENS
        )
        return Prices(
            slots=slots,
            host_max=max(host_max, slots),
            capacity=self.capacity,
            pages=min(max(pages, -(-longest // _PAGE_TOKENS) + 1), _FULL),
            step_tokens_max=self.step_tokens_max,
            disk_load_s=self.read_s(size_bytes),
            host_load_s=self.copy_s(size_bytes),
            step_s=self.step_s,
            row_s=self.row_s,
            prompt_token_s=self.prompt_token_s,
            adapter_s=self.adapter_s,
        )


def _names() -> dict[str, type]:
    return {field.name: type(field.default) for field in fields(Machine)}
