"""The production cores under virtual time: a heap of events in place of sockets and a GPU.

`gateway.core.Dispatcher` decides as it does in the live gateway, fed with the same events: arrivals
from a trace, reports from replicas, ends of requests. There is no second copy of the policy here,
so what this program says of it is true of the fleet, as far as the price list (`sim_replica`) is.

Laws: every arrival ends once, finished or refused; time never runs back; the same trace, dispatcher
settings and prices give the same outcomes, bit for bit, for ties in time break by order of birth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import assert_never

from gateway.core import dispatcher as gateway
from gateway.core.dispatcher import Dispatch, Dispatcher, Evict, Reject
from loadtests.sim_replica import Ended, Event, Job, Prices, ReportDue, SimReplica
from loadtests.stats import Summary, summarise
from loadtests.trace import Arrival, Trace
from shared.ids import ReplicaId, RequestId
from shared.messages import Tier


@dataclass(frozen=True, slots=True)
class Finished:
    """Times in seconds from arrival; `tier` is where the adapter was, None for the base."""

    arrival: Arrival
    replica: ReplicaId
    kind: str  # the placement: home, warm, spill or cold
    tier: Tier | None
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Refused:
    arrival: Arrival
    why: str


Outcome = Finished | Refused


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    served: int
    in_flight_mean: float
    in_flight_max: int


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a trace: outcomes in the order of its rows, and what replicas carried."""

    outcomes: tuple[Outcome, ...]
    replicas: Mapping[ReplicaId, ReplicaLoad]
    loads: Mapping[Tier, int]  # by the tier they came from
    ended_at_s: float

    @property
    def finished(self) -> tuple[Finished, ...]:
        return tuple(o for o in self.outcomes if isinstance(o, Finished))

    @property
    def refused(self) -> Counter[str]:
        return Counter(o.why for o in self.outcomes if isinstance(o, Refused))

    def tier_shares(self) -> dict[Tier, float]:
        """Of the finished requests that named an adapter: where it was when they came."""
        tiers = Counter(o.tier for o in self.finished if o.tier is not None)
        return {tier: tiers[tier] / tiers.total() if tiers else 0.0 for tier in Tier}

    def kinds(self) -> Counter[str]:
        return Counter(o.kind for o in self.finished)

    def first_token_s(self) -> Summary:
        return summarise(o.first_token_s for o in self.finished)


def simulate(trace: Trace, *, dispatcher: Dispatcher, replicas: int, prices: Prices) -> Run:
    """Run the whole trace; the dispatcher must be new. It is left as the run leaves it."""
    if not trace or replicas < 1:
        raise ValueError("a simulation needs an arrival and a replica")
    return _Simulation(trace, dispatcher, replicas, prices).run()


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


@dataclass(slots=True)
class _Meter:
    """Requests in flight at one replica, integrated over time."""

    now: int = 0
    max: int = 0
    since: float = 0.0
    area: float = 0.0

    def set(self, count: int, at: float) -> None:
        self.area += self.now * (at - self.since)
        self.now, self.since, self.max = count, at, max(self.max, count)


class _Simulation:
    def __init__(self, trace: Trace, dispatcher: Dispatcher, replicas: int, prices: Prices) -> None:
        self._trace = trace
        self._dispatcher = dispatcher
        adapters = sorted({a.adapter for a in trace if a.adapter is not None})
        names = [ReplicaId(f"replica-{number}") for number in range(replicas)]
        self._replicas = {n: SimReplica(name=n, prices=prices, adapters=adapters) for n in names}
        self._meters = {name: _Meter() for name in names}
        self._placed: dict[RequestId, gateway.Placement] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._heap: list[tuple[float, int, ReplicaId | None, Event | Arrival | _Wake]] = []
        self._born = 0
        self._next_row = 0
        self._wake_at: float | None = None

    def run(self) -> Run:
        # The fleet is there before its first request: reports are heard at time zero.
        for name, replica in self._replicas.items():
            self._dispatcher.replica_added(name, 0.0)
            self._expect(name, replica.start(0.0))
        self._push_next_arrival()
        now = 0.0
        while len(self._outcomes) < len(self._trace):
            now, _, at, event = heappop(self._heap)
            self._happen(at, event, now)
            self._decide(now)
        return self._result(now)

    def _happen(self, name: ReplicaId | None, event: Event | Arrival | _Wake, now: float) -> None:
        if isinstance(event, _Wake):
            self._wake_at = None if self._wake_at == now else self._wake_at
        elif isinstance(event, Arrival):
            self._dispatcher.arrive(_at_the_door(self._next_row - 1, event), now)
            self._push_next_arrival()
        elif name is not None:
            replica = self._replicas[name]
            if isinstance(event, ReportDue):
                report, coming = replica.report(now)
                if report is not None:
                    self._dispatcher.report(report, now)
            else:
                coming = replica.handle(event, now)
                if isinstance(event, Ended):
                    self._end(name, event, now)
            self._expect(name, coming)

    def _decide(self, now: float) -> None:
        for decision in self._dispatcher.poll(now):
            match decision:
                case Dispatch(request, placement):
                    self._placed[request] = placement
                    row = self._trace[int(request)]
                    job = Job(request, row.adapter, row.prompt_tokens, row.output_tokens)
                    replica = self._replicas[placement.replica]
                    self._expect(placement.replica, replica.submit(job, now))
                    self._meters[placement.replica].set(replica.in_flight, now)
                case Reject(request, why) | Evict(request, why):
                    self._outcome(request, Refused(self._trace[int(request)], str(why)))
                case _:
                    assert_never(decision)
        wake_at = self._dispatcher.next_wakeup(now)
        if wake_at is not None and (self._wake_at is None or wake_at < self._wake_at):
            self._wake_at = max(wake_at, now)
            self._push(self._wake_at, None, _Wake())

    def _end(self, name: ReplicaId, event: Ended, now: float) -> None:
        job = event.job
        self._dispatcher.finish(job.request, job.prompt_tokens, job.output_tokens, now)
        self._meters[name].set(self._replicas[name].in_flight, now)
        placement, row = self._placed.pop(job.request), self._trace[int(job.request)]
        finished = Finished(
            arrival=row,
            replica=name,
            kind=str(placement.kind),
            tier=event.tier,
            queue_s=placement.queue_s,
            first_token_s=event.first_token_at - row.at_s,
            total_s=now - row.at_s,
        )
        self._outcome(job.request, finished)

    def _outcome(self, request: RequestId, outcome: Outcome) -> None:
        assert int(request) not in self._outcomes, f"request {request} ended twice"
        self._outcomes[int(request)] = outcome

    def _push_next_arrival(self) -> None:
        if self._next_row < len(self._trace):
            row = self._trace[self._next_row]
            self._push(row.at_s, None, row)
            self._next_row += 1

    def _expect(self, name: ReplicaId, coming: list[tuple[float, Event]]) -> None:
        for at, event in coming:
            self._push(at, name, event)

    def _push(self, at: float, name: ReplicaId | None, event: Event | Arrival | _Wake) -> None:
        self._born += 1
        heappush(self._heap, (at, self._born, name, event))

    def _result(self, now: float) -> Run:
        self._dispatcher.check()
        loads: Counter[Tier] = Counter()
        carried = {}
        for name, replica in self._replicas.items():
            replica.check()
            loads.update(replica.loads)
            meter = self._meters[name]
            meter.set(meter.now, now)
            carried[name] = ReplicaLoad(replica.served, meter.area / now if now else 0.0, meter.max)
        outcomes = tuple(self._outcomes[number] for number in range(len(self._trace)))
        return Run(outcomes, carried, loads, now)


def _at_the_door(number: int, row: Arrival) -> gateway.Arrival:
    """The row's number is the request's id; clients ask for as many tokens as they will get."""
    return gateway.Arrival(
        request=RequestId(str(number)),
        tenant=row.tenant,
        weight=1.0,
        adapter=row.adapter,
        input_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
    )
