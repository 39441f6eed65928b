"""What others do, to be compared with: each arrival goes somewhere at once, and waits there.

    random          any live replica, evenly
    round-robin     one after another
    least-loaded    the fewest in flight (join the shortest queue)
    two-choices     the less loaded of two drawn at random
    hash            the adapter's home on the ring, however busy
    bounded-hash    the first on the ring below c times the mean in flight, the one to be placed
                    included (Mirrokni, Thorup & Zadimoghaddam, Consistent Hashing with Bounded
                    Loads, 2016), as KubeAI and HAProxy (hash-balance-factor) do

None of them queues, and none knows where adapters are. They see replicas that join, leave and are
lost as the gateway does. Requests for the base, which hash by nothing, go to the least loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Final, NamedTuple

from gateway.core.decisions import Arrival, Decision, Dispatch, Evict, Placement, RejectReason
from gateway.core.fleet import Conduct, Verdict
from gateway.core.orders import Order
from gateway.core.ring import AdapterRing
from gateway.core.terms import Choice, Kind
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import AdapterState, ReplicaReport

BASELINES: Final = (
    "random",
    "round-robin",
    "least-loaded",
    "two-choices",
    "hash",
    "bounded-hash",
)


class _Flying(NamedTuple):
    arrival: Arrival
    replica: ReplicaId
    tried: frozenset[ReplicaId]


class Baseline:
    def __init__(
        self, name: str, *, seed: int = 1, vnodes: int = 128, load_factor: float = 1.25
    ) -> None:
        self._choose: Callable[[AdapterId | None], ReplicaId] = {
            "random": lambda _: self._draw(),
            "round-robin": lambda _: self._next(),
            "least-loaded": lambda _: self._least(),
            "two-choices": lambda _: min((self._draw(), self._draw()), key=self._load),
            "hash": lambda adapter: self._order(adapter)[0],
            "bounded-hash": self._bounded,
        }[name]
        self._dice = Random(seed)
        self._ring = AdapterRing(vnodes=vnodes)
        self._load_factor = load_factor
        self._live: dict[ReplicaId, int] = {}  # requests in flight of those that take requests
        self._left: set[ReplicaId] = set()
        self._turn = 0
        self._flying: dict[RequestId, _Flying] = {}
        self._decisions: list[Decision] = []
        self.verdicts: list[Verdict] = []  # nobody is ejected

    # -- the fleet

    def replica_added(self, replica: ReplicaId, now: float) -> None:
        """It takes requests from its first report on."""

    def report(self, report: ReplicaReport, now: float) -> bool:
        if report.replica not in self._live and report.replica not in self._left:
            self._live[report.replica] = 0
            self._ring.add(report.replica)
        return True

    def replica_lost(self, replica: ReplicaId, now: float) -> None:
        self._live.pop(replica, None)
        self._ring.remove(replica)

    def leave(self, replica: ReplicaId, now: float) -> None:
        """For good; what runs there ends."""
        self._left.add(replica)
        self.replica_lost(replica, now)

    def listing(self, store: str, states: Iterable[AdapterState], now: float) -> None:
        """Nobody asks."""

    # -- requests

    @property
    def quiet(self) -> bool:
        return not self._decisions

    def place(self, arrival: Arrival, now: float) -> Dispatch | None:
        """There is no shorter way."""
        return None

    def arrive(self, arrival: Arrival, now: float) -> None:
        self._place(arrival, frozenset())

    def reroute(
        self, request: RequestId, failed: ReplicaId, now: float, *, conduct: Conduct | None
    ) -> None:
        flying = self._flying[request]
        self._end(request)
        self._place(flying.arrival, flying.tried | {failed})

    def finish(
        self,
        request: RequestId,
        input_tokens: int | None,
        output_tokens: int | None,
        now: float,
        conduct: Conduct | None = None,
    ) -> None:
        self._end(request)

    def poll(self, now: float) -> list[Decision]:
        decisions, self._decisions = self._decisions, []
        return decisions

    def orders(self, now: float) -> list[Order]:
        return []

    def next_wakeup(self, now: float) -> float | None:
        return None

    def check(self) -> None:
        for replica, load in self._live.items():
            flying = sum(one.replica == replica for one in self._flying.values())
            assert load == flying, f"{replica} has {flying}, not {load}"

    # -- inside

    def _place(self, arrival: Arrival, tried: frozenset[ReplicaId]) -> None:
        if not self._live:
            self._decisions.append(Evict(arrival.request, RejectReason.NO_REPLICA))
            return
        replica = self._choose(arrival.adapter)
        self._live[replica] += 1
        self._flying[arrival.request] = _Flying(arrival, replica, tried)
        home = arrival.adapter is None or self._order(arrival.adapter)[0] == replica
        kind = Kind.HOME if home else Kind.SPILL
        choice = Choice(replica, kind, "", False, (), frozenset())
        self._decisions.append(Dispatch(arrival.request, Placement(choice, 0.0)))

    def _end(self, request: RequestId) -> None:
        flying = self._flying.pop(request)
        if flying.replica in self._live:
            self._live[flying.replica] -= 1

    def _load(self, replica: ReplicaId) -> int:
        return self._live[replica]

    def _names(self) -> list[ReplicaId]:
        return list(self._live)

    def _draw(self) -> ReplicaId:
        return self._names()[int(self._dice.random() * len(self._live))]

    def _next(self) -> ReplicaId:
        self._turn += 1
        return self._names()[self._turn % len(self._live)]

    def _least(self) -> ReplicaId:
        return min(self._live, key=lambda replica: (self._live[replica], replica))

    def _order(self, adapter: AdapterId | None) -> tuple[ReplicaId, ...]:
        return (self._least(),) if adapter is None else self._ring.near(adapter)

    def _bounded(self, adapter: AdapterId | None) -> ReplicaId:
        mean = (sum(self._live.values()) + 1) / len(self._live)
        bound = math.ceil(self._load_factor * mean)
        fits = (r for r in self._order(adapter) if self._live[r] < bound)
        return next(fits, self._least())
