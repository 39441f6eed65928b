"""What things cost a simulated replica, and how much of each it has.

A step takes

    step_s + row_s * rows + prompt_token_s * prompt tokens + adapter_s * distinct adapters

which is linear in what can be counted, so a fit of measured steps gives the prices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What things cost, in seconds, and how much of each a replica has."""

    slots: int = 16
    host_max: int = 128
    capacity: int = 32  # sequences that run at once
    pages: int = 8192
    step_tokens_max: int = 512
    disk_load_s: float = 0.15  # disk to host memory
    host_load_s: float = 0.004  # host memory to a slot
    step_s: float = 0.015
    row_s: float = 0.0001
    prompt_token_s: float = 0.00002
    adapter_s: float = 0.0001
    report_interval_s: float = 0.05
    heartbeat_s: float = 1.0

    def step_takes_s(self, *, rows: int, prompt_tokens: int, adapters: int) -> float:
        per_row = self.row_s * rows + self.prompt_token_s * prompt_tokens
        return self.step_s + per_row + self.adapter_s * adapters

    def requests_per_s(self, *, prompt_tokens: float, output_tokens: float) -> float:
        """What one replica can do when all its places are taken all the time."""
        rows = self.capacity
        full_s = self.step_takes_s(rows=rows, prompt_tokens=0, adapters=min(self.slots, rows))
        return 1 / (output_tokens / rows * full_s + self.prompt_token_s * prompt_tokens)

    def changed(self, changes: Iterable[str]) -> Prices:
        """With `NAME=VALUE` in place of what it was. Raises ValueError, naming the names."""
        names = {field.name: type(getattr(self, field.name)) for field in fields(self)}
        new: dict[str, Any] = {}
        for change in changes:
            name, _, value = change.partition("=")
            if name not in names:
                raise ValueError(f"{change!r}: NAME=VALUE, of {', '.join(names)}")
            new[name] = names[name](value)
            if new[name] < 0:
                raise ValueError(f"{change!r}: a price is not negative")
        return replace(self, **new)
