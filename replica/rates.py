"""Rates: how fast adapters have lately come from each tier, in bytes a second.

Each observation counts by its seconds, and an older one the less, the more seconds came after it:

    rate = sum of bytes / sum of seconds,   both halved for every `HALF_S` seconds of loading since.

So one tiny adapter does not speak for a disk, and a disk that became slow is soon called so. 0 says
that nothing came yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HALF_S: Final = 2.0


@dataclass(slots=True)
class Rate:
    _bytes: float = 0.0
    _seconds: float = 0.0

    def observe(self, size_bytes: int, seconds: float) -> None:
        kept = 0.5 ** (seconds / HALF_S)
        self._bytes = self._bytes * kept + size_bytes
        self._seconds = self._seconds * kept + seconds

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds if self._seconds > 0 else 0.0


class Rates:
    """`copy`: host memory to slot; `read`: disk to host memory; `fetch`: store to host memory."""

    def __init__(self) -> None:
        self.copy, self.read, self.fetch = Rate(), Rate(), Rate()
