"""The twin: the simulator, and the live pump on a virtual clock, decide alike.

The same trace, the same replicas (sim_replica) and the same settings; on one side the simulator's
heap of events, on the other asyncio: a task a request, leases, futures, the pump's own timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_loop import VirtualLoop

from gateway.config import GatewayConfig
from gateway.core.dispatcher import Conduct, Decision, Dispatch, Order
from gateway.fleet.deciding import dispatcher_of
from gateway.fleet.pump import Pump, Refused
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
from loadtests.trace import Trace
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


def simulated(trace: Trace, config: GatewayConfig, prices: Prices, replicas: int) -> Log:
    log: Log = []
    simulate(
        trace,
        policy=dispatcher_of(config),
        replicas=replicas,
        prices=prices,
        warm_up_s=WARM_UP_S,
        decided=lambda now, decision: log.append(entry(decision)),
    )
    return log


class Live:
    """A pump with simulated replicas behind it, driven by the loop's timers."""

    def __init__(self, trace: Trace, config: GatewayConfig, prices: Prices, replicas: int) -> None:
        self.log: Log = []
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        names = [ReplicaId(f"replica-{n}") for n in range(replicas)]
        self._replicas = {name: SimReplica(name=name, prices=prices) for name in names}
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
        for name, replica in self._replicas.items():
            self._pump.replica_added(name)
            self._expect(replica, replica.start(0.0))
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
        ended = self._done[request] = self._loop.create_future()
        lease = self._pump.lease(at_the_door(number, row))
        try:
            async with lease:
                await ended
                lease.settle(row.prompt_tokens, row.output_tokens)
                lease.conduct = Conduct.WELL
        except Refused:
            pass

    def _decided(self, decision: Decision) -> None:
        self.log.append(entry(decision))
        if isinstance(decision, Dispatch):  # the wire takes no time here, nor in the simulator
            row = self._trace[int(decision.request)]
            job = Job(decision.request, row.adapter, row.prompt_tokens, row.output_tokens)
            replica = self._replicas[decision.placement.replica]
            self._expect(replica, replica.submit(job, self._loop.time())[1])

    def _ordered(self, order: Order) -> None:
        self.log.append(entry(order))
        replica = self._replicas[order.replica]
        self._expect(replica, replica.bring(order, self._loop.time())[1])

    def _expect(self, replica: SimReplica, coming: Sequence[tuple[float, Event]]) -> None:
        for at, event in coming:
            self._loop.call_at(at, self._happen, replica, event, at)

    def _happen(self, replica: SimReplica, event: Event, at: float) -> None:
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


def live(trace: Trace, config: GatewayConfig, prices: Prices, replicas: int) -> Log:
    async def run() -> Log:
        return await Live(trace, config, prices, replicas).run()

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


@settings(max_examples=6)
@given(recipes, prices, st.integers(1, 4))
def test_simulator_and_live_pump_give_the_same_decisions(r: Recipe, p: Prices, n: int) -> None:
    config = GatewayConfig.model_validate({"queue": {"per_tenant_max": 30, "ttl_s": 5}})
    trace = tuple(generate(r))
    ours = simulated(trace, config, p, n)
    assert ours == live(trace, config, p, n)
    assert ours == simulated(trace, config, p, n)
