"""What the router weighs, and what it decides: kept small, since it is made for every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from gateway.core.replica import Replica
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, Tier

Tried = frozenset[ReplicaId]

WHILE_FULL: Final = 4
"""Times as long a wait for a near place while all who have it are full, or keep their last places
back: then others have hardly a place either. Where one is merely at its bound, others have room,
and are worth a copy sooner."""


class Base(str):
    """The name of a base model, where an adapter's could stand: its requests take no adapter."""

    __slots__ = ()


Model = AdapterId | Base | None
"""What decides where a request may go. None: the base model, whichever."""


@dataclass(slots=True)
class Ask:
    """Who asks for a place, and when."""

    tried: Tried
    claim: float  # to a replica's last places (gateway/core/reserve.py)
    now: float


class Kind(StrEnum):
    """What a placement was, exactly one of:

    HOME   at home, where the adapter is in a slot or in host memory; every base request
    WARM   elsewhere, in a slot or in host memory there
    SPILL  elsewhere, from disk, because home could not take it: full, at its bound, or tried
    COLD   from disk although home could take it: at home, or where it was expected sooner
    """

    HOME = "home"
    WARM = "warm"
    SPILL = "spill"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class CandidateTerms:
    """What was weighed for one replica; times in seconds."""

    replica: ReplicaId
    step: int  # along the ring from home; -1 when it is no candidate
    tier: Tier | None  # None: the base model, or the adapter is not served there
    load: int
    bound: int
    queue_s: float
    load_s: float
    slot_s: float
    hop_s: float
    crowd_s: float
    cold_s: float
    refused: str = ""  # tried, full, kept, bound; or its state, or absent: no candidate at all
    inferred: bool = False  # the tier is concluded, not reported

    @property
    def expected_s(self) -> float:
        wait_s = self.queue_s + self.load_s + self.slot_s
        return wait_s + self.hop_s + self.crowd_s + self.cold_s


class Choice(NamedTuple):
    replica: ReplicaId
    kind: Kind
    digest: str
    cold: bool  # it would start a load from disk
    telling: Sequence[Weighed]  # home, the chosen, and each that was refused though nearer
    awaited: Tried  # candidates nearer to their adapter that could not take it now
    patience: int = 1  # how many times as long as usual to wait for one of them

    @property
    def terms(self) -> tuple[CandidateTerms, ...]:
        """Made for who asks: most requests are placed without anybody looking."""
        return tuple([weighed.terms() for weighed in self.telling])


@dataclass(slots=True)
class Weighed:
    """One candidate's terms while they are compared."""

    expected_s: float
    refused: str
    mine: Replica
    state: AdapterState | None
    step: int
    load: int
    bound: int
    queue_s: float
    load_s: float
    slot_s: float
    hop_s: float
    crowd_s: float
    cold_s: float

    def terms(self) -> CandidateTerms:
        return CandidateTerms(
            replica=self.mine.id,
            step=self.step,
            tier=None if self.state is None else self.state.tier,
            load=self.load,
            bound=self.bound,
            queue_s=self.queue_s,
            load_s=self.load_s,
            slot_s=self.slot_s,
            hop_s=self.hop_s,
            crowd_s=self.crowd_s,
            cold_s=self.cold_s,
            refused=self.refused,
            inferred=self.state is not None and self.state.inferred,
        )


def kind_of(chosen: Weighed, home: Weighed) -> Kind:
    resident = chosen.state is not None and chosen.state.tier is not _DISK
    if chosen is home:
        return _HOME if resident else _COLD
    if resident:
        return _WARM
    return _SPILL if home.refused else _COLD


_DISK = Tier.DISK  # to ask an enum for a member costs as much as a call
_HOME, _WARM, _SPILL, _COLD = Kind
