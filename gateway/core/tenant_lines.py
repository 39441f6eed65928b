"""The fair queue's rows: a request, a line of them, a tenant with its lines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shared.ids import RequestId, TenantId

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True, eq=False)
class Entry(Generic[Key]):
    request: RequestId
    tenant: TenantId
    key: Key
    cost: float
    place: int  # in order of arrival; kept when the request comes back
    charge: float = 0.0  # virtual units, while in flight
    weight: float = 1.0  # of the tenant when it was charged


@dataclass(slots=True, eq=False)
class Line(Generic[Key]):
    key: Key
    entries: OrderedDict[RequestId, Entry[Key]] = field(default_factory=OrderedDict)
    offered: int | None = None  # the head's place in the tenant's `ready`; None while parked
    parked: bool = False


@dataclass(slots=True, eq=False)
class Tenant(Generic[Key]):
    id: TenantId
    weight: float
    level: float
    unsettled: float = 0.0
    elsewhere: float = 0.0  # unsettled at other gateways, in virtual units
    waiting: int = 0
    in_flight: int = 0
    lines: dict[Key, Line[Key]] = field(default_factory=dict)
    ready: list[tuple[int, Key]] = field(default_factory=list)  # (place of the head, line)
    ranked: tuple[float, int] | None = None  # where it stands in the order
    marked: float | None = (
        None  # its tag at the last mark; None: it did not wait all the time since
    )

    @property
    def tag(self) -> float:
        return self.level + self.unsettled + self.elsewhere

    def check(self, rank: tuple[float, int] | None) -> None:
        """`rank`: where it really stands in the order."""
        assert self.ranked == rank
        assert (rank is None) == (not self.ready)
        assert rank is None or rank[0] == self.tag, f"{self.id}: a stale rank"
        assert self.unsettled >= -1e-6
        assert self.marked is None or self.waiting, f"{self.id}: marked, and does not wait"
        for key, line in self.lines.items():
            places = [entry.place for entry in line.entries.values()]
            assert places, f"{self.id}: an empty line for {key}"
            assert places == sorted(places), f"{self.id}: not first in, first out"
            assert line.parked or (places[0], key) in self.ready


def marked(tenants: Iterable[Tenant[Key]]) -> list[float]:
    """What each tenant that has waited ever since the last mark was given, in virtual units; and
    the next mark."""
    given = []
    for mine in tenants:
        if mine.marked is not None:
            given.append(mine.tag - mine.marked)
        mine.marked = mine.tag if mine.waiting else None
    return given


def jain(shares: Iterable[float]) -> float:
    """(Σx)² / (n Σx²): 1 when all have the same, 1/n when one has it all (Jain, Chiu and Hawe,
    1984). Of nobody, or of nothing: 1."""
    x = [max(0.0, share) for share in shares]
    squares = sum(one * one for one in x)
    return sum(x) ** 2 / (len(x) * squares) if squares else 1.0
