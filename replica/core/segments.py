"""Segments: the layout that gathered kernels read.

Law: segment i is the tokens `starts[i] : starts[i + 1]` of the step, laid end to end, and all of
them use `slots[i]`; segments are maximal, so neighbours have different slots, and together they are
every token once. A slot of -1 is tokens without adapter: a kernel leaves them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from replica.core.step import BASE_SLOT, Step


@dataclass(frozen=True, slots=True)
class Segments:
    starts: tuple[int, ...]  # one more than slots; in tokens; starts[0] == 0, the last is the total
    slots: tuple[int, ...]

    @property
    def base_only(self) -> bool:
        """No token has an adapter: the whole gathered path can be left out."""
        return all(slot == BASE_SLOT for slot in self.slots)


def segments(step: Step) -> Segments:
    starts: list[int] = []
    slots: list[int] = []
    total = 0
    for row in step.rows:
        if not slots or slots[-1] != row.slot:
            starts.append(total)
            slots.append(row.slot)
        total += len(row.tokens)
    return Segments(starts=(*starts, total), slots=tuple(slots))
