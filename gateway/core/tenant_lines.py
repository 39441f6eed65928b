"""The fair queue's rows: a request, a line of them, a tenant with its lines."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
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

    @property
    def tag(self) -> float:
        return self.level + self.unsettled + self.elsewhere

    def check(self) -> None:
        assert self.unsettled >= -1e-6
        for key, line in self.lines.items():
            places = [entry.place for entry in line.entries.values()]
            assert places, f"{self.id}: an empty line for {key}"
            assert places == sorted(places), f"{self.id}: not first in, first out"
            assert line.parked or (places[0], key) in self.ready
