"""The twin: the simulator, and the live pump on a virtual clock, decide alike.

The same trace, the same replicas (sim_replica), faults and settings; on one side the simulator's
heap of events, on the other asyncio: a task a request, leases, futures, the pump's own timer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loop import VirtualLoop

from gateway.config import GatewayConfig
from gateway.core.dispatcher import Conduct, Decision, Dispatch, Order
from gateway.fleet.deciding import dispatcher_of
from gateway.fleet.pump import Lease, Pump, Refused
from loadtests.faults import Fault, parse
from loadtests.job import Job, at_the_door
from loadtests.prices import Prices
from loadtests.recipe import Recipe, generate
from loadtests.sim_replica import (
    STORE,
    Event,
    ReportDue,
    SimReplica,
    listing,
)
from loadtests.simulator import simulate
from loadtests.trace import Arrival, Trace
from shared import tasks
from shared.ids import ReplicaId, RequestId

WARM_UP_S = 3.0

Log = list[tuple[Any, ...]]


def entry(decision: object) -> tuple[Any, ...]:
    if isinstance(decision, Dispatch):
        placement = decision.placement
        return (decision.request, placement.replica, str(placement.kind), placement.digest)
    if isinstance(decision, Order):
        return tuple(decision)
    return (type(decision).__name__, decision.request, str(decision.why))  # type: ignore[attr-defined]


def simulated(
    trace: Trace,
    config: GatewayConfig,
    prices: Prices,
    replicas: int,
    faults: Sequence[Fault] = (),
) -> Log:
    log: Log = []
    simulate(
        trace,
        policy=dispatcher_of(config),
        replicas=replicas,
        prices=prices,
        faults=faults,
        warm_up_s=WARM_UP_S,
        decided=lambda now, decision: log.append(entry(decision)),
    )
    return log


class Gone(Exception):
    """The connection to a replica broke."""

    def __init__(self, replica: ReplicaId, *, begun: bool) -> None:
        self.replica, self.begun = replica, begun


class Live:
    """A pump with simulated replicas behind it, driven by the loop's timers."""

    def __init__(
        self,
        trace: Trace,
        config: GatewayConfig,
        prices: Prices,
        replicas: int,
        faults: Sequence[Fault],
    ) -> None:
        self.log: Log = []
        self._trace = trace
        self._prices = prices
        self._loop = asyncio.get_running_loop()
        self._first = [ReplicaId(f"replica-{n}") for n in range(replicas)]
        self._replicas: dict[ReplicaId, SimReplica] = {}
        self._lives: Counter[ReplicaId] = Counter()
        for fault in faults:
            self._loop.call_at(WARM_UP_S + fault.at_s, self._suffer, fault)
        self._done: dict[RequestId, asyncio.Future[None]] = {}
        self._pump = Pump(
            dispatcher_of(config),
            clock=self._loop.time,
            observe=self._decided,
            carry_out=self._ordered,
        )

    async def run(self) -> Log:
        adapters = sorted({row.adapter for row in self._trace if row.adapter is not None})
        self._pump.dispatcher.listing(STORE, listing(adapters), 0.0)
        for name in self._first:
            self._join(name)
        clients = [tasks.spawn(self._client(n), name=f"{n}") for n in range(len(self._trace))]
        await asyncio.gather(*clients)
        self._pump.dispatcher.check()
        self._pump.close()
        return self.log

    async def _client(self, number: int) -> None:
        row = self._trace[number]
        due: asyncio.Future[None] = self._loop.create_future()
        self._loop.call_at(WARM_UP_S + row.at_s, due.set_result, None)
        await due
        request = RequestId(str(number))
        self._done[request] = self._loop.create_future()
        lease = self._pump.lease(at_the_door(number, row))
        with contextlib.suppress(Refused):
            async with lease:
                while lease.conduct is None:
                    await self._ended(lease, request, row)

    async def _ended(self, lease: Lease, request: RequestId, row: Arrival) -> None:
        """Its last token; or its replica is gone, and another begins it if none had come."""
        try:
            await self._done[request]
        except Gone as gone:
            if gone.begun:
                lease.settle(row.prompt_tokens, None)
                lease.conduct = Conduct.GONE
            else:
                self._done[request] = self._loop.create_future()
                await lease.retry(gone.replica, Conduct.GONE)
        else:
            lease.settle(row.prompt_tokens, row.output_tokens)
            lease.conduct = Conduct.WELL

    def _join(self, name: ReplicaId) -> None:
        self._lives[name] += 1
        replica = SimReplica(name=name, prices=self._prices, boot=self._lives[name])
        self._replicas[name] = replica
        self._pump.replica_added(name)
        self._expect(replica, replica.start(self._loop.time()))

    def _suffer(self, fault: Fault) -> None:
        replica = self._replicas.get(fault.replica)
        if fault.kind == "added" and replica is None:
            self._join(fault.replica)
        elif fault.kind == "drained":
            self._pump.dispatcher.leave(fault.replica, self._loop.time())
            self._pump.wake()
        elif fault.kind == "slow" and replica is not None:
            replica.slowness = fault.factor
        elif fault.kind == "lost" and replica is not None:
            del self._replicas[fault.replica]
            self._pump.replica_lost(fault.replica)
            for job, begun in replica.jobs:
                self._done[job.request].set_exception(Gone(fault.replica, begun=begun))

    def _decided(self, decision: Decision) -> None:
        self.log.append(entry(decision))
        if isinstance(decision, Dispatch):  # the wire takes no time here, nor in the simulator
            row = self._trace[int(decision.request)]
            job = Job(decision.request, row.adapter, row.prompt_tokens, row.output_tokens)
            replica = self._replicas[decision.placement.replica]
            self._expect(replica, replica.submit(job, self._loop.time())[1])

    def _ordered(self, order: Order) -> None:
        self.log.append(entry(order))
        if (replica := self._replicas.get(order.replica)) is not None:
            self._expect(replica, replica.bring(order, self._loop.time())[1])

    def _expect(self, replica: SimReplica, coming: Sequence[tuple[float, Event]]) -> None:
        for at, event in coming:
            self._loop.call_at(at, self._happen, replica, event, at)

    def _happen(self, replica: SimReplica, event: Event, at: float) -> None:
        if self._replicas.get(replica.name) is not replica:
            return  # what was lost says no more
        if isinstance(event, ReportDue):
            report, coming = replica.report(at)
            if report is not None:
                self._pump.report(report)
            self._expect(replica, coming)
        else:
            ended, coming = replica.handle(event, at)
            self._expect(replica, coming)
            for one in ended:
                self._done[one.job.request].set_result(None)


def live(
    trace: Trace,
    config: GatewayConfig,
    prices: Prices,
    replicas: int,
    faults: Sequence[Fault] = (),
) -> Log:
    async def run() -> Log:
        return await Live(trace, config, prices, replicas, faults).run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


recipes = st.builds(
    Recipe,
    seed=st.integers(0, 1 << 16),
    arrivals=st.integers(1, 60),
    rate_per_s=st.sampled_from([2, 20, 80]),
    adapters=st.integers(1, 24),
    base_share=st.sampled_from([0, 0.3]),
    tenants=st.integers(1, 4),
    output_tokens_mean=st.sampled_from([4.0, 24.0]),
)
prices = st.builds(
    Prices, slots=st.integers(1, 4), host_max=st.integers(4, 12), capacity=st.integers(1, 6)
)


faults = st.builds(
    Fault,
    at_s=st.floats(-1, 4).map(lambda s: s + 1e-7),  # beside every other moment
    kind=st.sampled_from(["lost", "added", "drained", "slow"]),
    replica=st.sampled_from([ReplicaId(f"replica-{n}") for n in range(4)]),
    factor=st.sampled_from([1.0, 3.0]),
)
CONFIG = GatewayConfig.model_validate({"queue": {"per_tenant_max": 30, "ttl_s": 5}})


@settings(max_examples=8)
@given(recipes, prices, st.integers(1, 4), st.lists(faults, max_size=4))
def test_simulator_and_live_pump_give_the_same_decisions(
    r: Recipe, p: Prices, n: int, faults: list[Fault]
) -> None:
    trace = tuple(generate(r))
    ours = simulated(trace, CONFIG, p, n, faults)
    assert ours == live(trace, CONFIG, p, n, faults)
    assert ours == simulated(trace, CONFIG, p, n, faults)


def test_they_decide_alike_while_replicas_are_lost_drained_and_joined() -> None:
    recipe = Recipe(seed=3, arrivals=150, rate_per_s=60, adapters=12, output_tokens_mean=24)
    words = "slow:replica-2@0.11:3 lost:replica-0@0.53 added:replica-3@0.87 drained:replica-1@1.31"
    events = [parse(word) for word in [*words.split(), "added:replica-0@1.61"]]
    small = Prices(slots=3, host_max=12, capacity=4)
    trace = tuple(generate(recipe))
    ours = simulated(trace, CONFIG, small, 3, events)
    assert {entry[1] for entry in ours} >= {"replica-0", "replica-1", "replica-2", "replica-3"}
    assert ours == live(trace, CONFIG, small, 3, events)
