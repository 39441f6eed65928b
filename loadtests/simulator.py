"""The production cores under virtual time: a heap of events in place of sockets and a GPU.

`gateway.core.Dispatcher` decides as it does in the live gateway, fed with the same events: arrivals
from a trace, reports from replicas, ends of requests; and `sim_replica` runs the replica's own
scheduler and cache. There is no second copy of the policy here, so what this program says of it is
true of the fleet, as far as the price list is. A baseline (`policies`) may stand in its place.

Laws: every arrival ends once, finished, refused or cut; time never runs back; the same trace,
policy and prices give the same outcomes, bit for bit, for ties in time break by order of birth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple, assert_never

from gateway.core import decisions as gateway
from gateway.core.decisions import Dispatch, Evict, Reject
from gateway.core.fleet import Conduct
from loadtests.faults import Fault
from loadtests.job import Job, at_the_door
from loadtests.policy import Policy
from loadtests.prices import Prices
from loadtests.run import Cut, Finished, Meter, Outcome, Refused, ReplicaLoad, Run
from loadtests.sim_replica import STORE, Ended, Event, ReportDue, SimReplica
from loadtests.sim_replica import listing as store_listing
from loadtests.trace import Arrival, Trace
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import Tier

TICK_S: Final = 0.001
"""A timer of the live gateway is not finer than this."""

_SAMPLE_S: Final = 0.1  # between two looks at the balance of the fleet


def simulate(
    trace: Trace,
    *,
    policy: Policy,
    replicas: int,
    prices: Prices,
    faults: Sequence[Fault] = (),
    warm_up_s: float = 0.0,
    stored: Iterable[AdapterId] = (),
    decided: Callable[[float, object], None] = lambda now, decision: None,
) -> Run:
    """Run the whole trace; the policy must be new. It is left as the run leaves it.

    The fleet is up `warm_up_s` before the trace begins: time to bring adapters, for who does so.
    `stored` are adapters beside those of the trace, which compete for host memory all the same.
    `decided` hears each decision and order in turn.
    """
    if not trace or replicas < 1:
        raise ValueError("a simulation needs an arrival and a replica")
    made = _Simulation(trace, policy, replicas, prices, faults, warm_up_s, decided)
    return made.run(stored)


class _Wake(NamedTuple):
    number: int


class _Sample(NamedTuple):
    pass


_Happening = Event | Arrival | Fault | _Wake | _Sample


class _Simulation:
    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        replicas: int,
        prices: Prices,
        faults: Sequence[Fault],
        begin_s: float,
        decided: Callable[[float, object], None],
    ) -> None:
        self._trace = trace
        self._policy = policy
        self._prices = prices
        self._begin_s = begin_s
        self._decided = decided
        self._first = [ReplicaId(f"replica-{number}") for number in range(replicas)]
        self._replicas: dict[ReplicaId, SimReplica] = {}
        self._gone: list[SimReplica] = []
        self._lives: Counter[ReplicaId] = Counter()
        self._meters: dict[ReplicaId, Meter] = {}
        self._leaving: set[ReplicaId] = set()
        self._placed: dict[RequestId, gateway.Placement] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._balance: list[tuple[int, float]] = []
        self._heap: list[tuple[float, int, SimReplica | None, _Happening]] = []
        self._born = 0
        self._next_row = 0
        self._wake_at: float | None = None  # the only timer, as in the pump
        self._wakes = 0
        for fault in faults:
            self._push(begin_s + fault.at_s, None, fault)

    def run(self, stored: Iterable[AdapterId]) -> Run:
        # The fleet is there before its first request: reports are heard at time zero.
        adapters = sorted({*stored, *(a.adapter for a in self._trace if a.adapter is not None)})
        self._policy.listing(STORE, store_listing(adapters), 0.0)
        for name in self._first:
            self._join(name, 0.0)
        self._push_next_arrival()
        self._push(self._begin_s, None, _Sample())
        now = 0.0
        while len(self._outcomes) < len(self._trace):
            now, _, at, event = heappop(self._heap)
            self._happen(at, event, now)
        return self._result(now)

    def _happen(self, at: SimReplica | None, event: _Happening, now: float) -> None:
        match event:
            case _Wake(number):
                if number == self._wakes:
                    self._wake_at = None
                    self._decide(now)
            case _Sample():
                self._sample(now)
            case Arrival():
                self._arrive(self._next_row - 1, event, now)
                self._push_next_arrival()
            case Fault():
                self._suffer(event, now)
            case _:
                assert at is not None
                if self._replicas.get(at.name) is at:  # what was lost says no more
                    self._advance(at, event, now)

    def _arrive(self, number: int, row: Arrival, now: float) -> None:
        """By the short way or the long one, as `gateway.fleet.pump` does."""
        arrival = at_the_door(number, row)
        if (dispatch := self._policy.place(arrival, now)) is not None:
            self._carry_out(dispatch, now)
        else:
            self._policy.arrive(arrival, now)
            self._decide(now)

    def _advance(self, replica: SimReplica, event: Event, now: float) -> None:
        if isinstance(event, ReportDue):
            report, coming = replica.report(now)
            if report is not None and self._policy.report(report, now):
                self._decide(now)
            self._expect(replica, coming)
        else:
            ended, coming = replica.handle(event, now)
            self._expect(replica, coming)
            for one in ended:
                self._end(replica, one, now)
                if not self._policy.quiet:
                    self._decide(now)

    def _decide(self, now: float) -> None:
        for decision in self._policy.poll(now):
            self._carry_out(decision, now)
        self._policy.verdicts.clear()  # heard; the figures do not ask who was ejected
        for order in self._policy.orders(now):
            self._decided(now, order)
            if (replica := self._replicas.get(order.replica)) is not None:
                _, coming = replica.bring(order, now)
                self._expect(replica, coming)
        due = self._policy.next_wakeup(now)
        if self._wake_at is None or due is None or due < self._wake_at:
            self._wake_at = due
            self._wakes += 1
            if due is not None:
                self._push(max(due, now + TICK_S), None, _Wake(self._wakes))

    def _carry_out(self, decision: gateway.Decision, now: float) -> None:
        self._decided(now, decision)
        match decision:
            case Dispatch(request, placement):
                self._placed[request] = placement
                self._send(request, placement.replica, now)
            case Reject(request, why) | Evict(request, why):
                self._outcome(request, Refused(self._trace[int(request)], str(why)))
            case _:
                assert_never(decision)

    def _send(self, request: RequestId, name: ReplicaId, now: float) -> None:
        row, replica = self._trace[int(request)], self._replicas[name]
        job = Job(request, row.adapter, row.prompt_tokens, row.output_tokens)
        _, coming = replica.submit(job, now)
        self._expect(replica, coming)
        self._meters[name].set(replica.in_flight, now)

    def _end(self, replica: SimReplica, ended: Ended, now: float) -> None:
        job = ended.job
        self._policy.finish(job.request, job.prompt_tokens, job.output_tokens, now, Conduct.WELL)
        self._meters[replica.name].set(replica.in_flight, now)
        placement, row = self._placed.pop(job.request), self._trace[int(job.request)]
        came_at = row.at_s + self._begin_s
        finished = Finished(
            arrival=row,
            replica=replica.name,
            kind=str(placement.kind),
            tier=ended.tier,
            queue_s=placement.queue_s,
            first_token_s=ended.first_token_at - came_at,
            total_s=now - came_at,
        )
        self._outcome(job.request, finished)

    # -- the fleet

    def _join(self, name: ReplicaId, now: float) -> None:
        self._lives[name] += 1
        replica = SimReplica(name=name, prices=self._prices, boot=self._lives[name])
        self._replicas[name] = replica
        self._meters.setdefault(name, Meter(since=now))
        self._leaving.discard(name)
        self._policy.replica_added(name, now)
        self._decide(now)
        self._expect(replica, replica.start(now))

    def _suffer(self, fault: Fault, now: float) -> None:
        name = fault.replica
        match fault.kind:
            case "added":
                if name not in self._replicas:
                    self._join(name, now)
            case "drained":
                self._leaving.add(name)
                self._policy.leave(name, now)
                self._decide(now)
            case "slow":
                if (slow := self._replicas.get(name)) is not None:
                    slow.slowness = fault.factor
            case "lost":
                if (lost := self._replicas.pop(name, None)) is not None:
                    self._lose(lost, now)
            case _:
                assert_never(fault.kind)

    def _lose(self, lost: SimReplica, now: float) -> None:
        """Its stream breaks, and so does every connection to it, one event after another."""
        self._gone.append(lost)
        self._meters[lost.name].set(0, now)
        self._policy.replica_lost(lost.name, now)
        self._decide(now)
        for job, begun in lost.jobs:
            if begun:  # the client has seen a token: there is no second try
                del self._placed[job.request]
                self._policy.finish(job.request, job.prompt_tokens, None, now, Conduct.GONE)
                self._outcome(job.request, Cut(self._trace[int(job.request)], lost.name))
            else:
                self._policy.reroute(job.request, lost.name, now, conduct=Conduct.GONE)
            if not self._policy.quiet:
                self._decide(now)

    def _sample(self, now: float) -> None:
        loads = [r.in_flight for r in self._replicas.values() if r.name not in self._leaving]
        if loads:
            self._balance.append((max(loads), sum(loads) / len(loads)))
        if self._next_row < len(self._trace):
            self._push(now + _SAMPLE_S, None, _Sample())

    # -- events

    def _outcome(self, request: RequestId, outcome: Outcome) -> None:
        assert int(request) not in self._outcomes, f"request {request} ended twice"
        self._outcomes[int(request)] = outcome

    def _push_next_arrival(self) -> None:
        if self._next_row < len(self._trace):
            row = self._trace[self._next_row]
            self._push(self._begin_s + row.at_s, None, row)
            self._next_row += 1

    def _expect(self, replica: SimReplica, coming: Sequence[tuple[float, Event]]) -> None:
        for at, event in coming:
            self._push(at, replica, event)

    def _push(self, at: float, replica: SimReplica | None, event: _Happening) -> None:
        self._born += 1
        heappush(self._heap, (at, self._born, replica, event))

    def _result(self, now: float) -> Run:
        self._policy.check()
        loads: Counter[Tier] = Counter()
        carried: dict[ReplicaId, ReplicaLoad] = {}
        for replica in (*self._gone, *self._replicas.values()):
            replica.check()
            loads.update(replica.loads)
            meter = self._meters[replica.name]
            meter.set(meter.now, now)
            before = carried.get(replica.name)  # another life of it
            served = replica.served + (before.served if before else 0)
            carried[replica.name] = meter.load(served, now)
        outcomes = tuple(self._outcomes[number] for number in range(len(self._trace)))
        fetched = sum(replica.fetched for replica in (*self._gone, *self._replicas.values()))
        return Run(outcomes, carried, loads, fetched, tuple(self._balance), now - self._begin_s)
