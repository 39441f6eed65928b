"""What a reservation comes to: granted, and then settled once; or denied, with a wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.state.limits import Answer, LimitLine, Line, Plan, header_lines, lines_left
from shared.ids import RequestId


@dataclass(slots=True)
class Reservation:
    """What one request took; settled once, however often `settle` is called."""

    request: RequestId
    plan: Plan
    costs: Sequence[int]
    settled: bool = False

    @property
    def tokens(self) -> int:
        """Of the minute's limit of tokens; 0 when there is none."""
        lines = zip(self.plan.lines, self.costs, strict=True)
        return next((cost for line, cost in lines if line.name == "tokens"), 0)


class Granted(NamedTuple):
    answer: Answer
    reservation: Reservation
    at: float  # wall

    @property
    def left(self) -> list[LimitLine]:
        return lines_left(self.answer, self.at)

    @property
    def headers(self) -> str:
        """The tenant's limits, as header lines."""
        return header_lines(self.answer, self.at)


class Denied(NamedTuple):
    answer: Answer
    line: Line
    retry_after_s: float
    at: float  # wall
    never: bool = False  # the limit is 0: waiting does not help

    @property
    def limit(self) -> str:
        return self.line.name

    @property
    def spent(self) -> bool:
        """A budget: it is not a matter of a moment."""
        return self.line.kind == "budget"

    @property
    def left(self) -> list[LimitLine]:
        return lines_left(self.answer, self.at)

    @property
    def headers(self) -> str:
        return header_lines(self.answer, self.at)
