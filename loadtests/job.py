"""A row of a trace as the gateway sees it at its door, and as a simulated replica does."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core import decisions as gateway
from loadtests.trace import Arrival
from shared.ids import AdapterId, RequestId

BASE = "base"


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the replica sees it."""

    request: RequestId
    adapter: AdapterId | None
    prompt_tokens: int
    output_tokens: int


def at_the_door(number: int, row: Arrival) -> gateway.Arrival:
    """The row's number is the request's id; clients ask for as many tokens as they will get."""
    return gateway.Arrival(
        request=RequestId(str(number)),
        tenant=row.tenant,
        weight=1.0,
        adapter=row.adapter,
        input_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        base=BASE if row.adapter is None else "",
    )
