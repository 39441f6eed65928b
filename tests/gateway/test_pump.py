"""The real Dispatcher under asyncio: who waits is woken, and every arrival ends once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import BASE, ScriptedReplica, until

from gateway.core.dispatcher import Arrival, Conduct, Dispatcher, RejectReason
from gateway.fleet.pump import Lease, Pump, Refused
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId

REPLICA = ReplicaId("replica-0")


def pump(*replicas: str, capacity: int = 1, **more: Any) -> Pump:
    options: dict[str, Any] = {
        "load_factor": 1.25,
        "load_floor": 8,
        "vnodes": 8,
        "service_s": 0.05,
        "host_load_s": 0.005,
        "disk_load_s": 0.15,
        "hop_s": 0.002,
        "per_tenant_max": 100,
        "ttl_s": 60,
        "input_weight": 1,
        "output_weight": 2,
        "warm_wait_s": 0.0,
        "silence_heartbeats": 3,
    }
    made = Pump(Dispatcher(**{**options, **more}))
    for name in replicas or (REPLICA,):
        made.replica_added(ReplicaId(name))
        one = ScriptedReplica(name, adapters=("a",), capacity=capacity, heartbeat_s=60)
        assert made.report(one.report())
    return made


def arrival(request: str, tenant: str = "t", adapter: str | None = None) -> Arrival:
    name = AdapterId(adapter) if adapter else None
    return Arrival(RequestId(request), TenantId(tenant), 1.0, name, 10, 10)


def places(it: Pump) -> int:
    """How many the dispatcher puts in flight at once, from one replica's limit."""
    return it.dispatcher.view(it.clock())[0].capacity + 1


async def test_a_free_place_is_leased_without_waiting() -> None:
    it = pump()
    async with it.lease(arrival("r1")) as lease:
        assert lease.placement.replica == REPLICA
        assert it.dispatcher.in_flight == 1
        lease.settle(3, 4)
    assert (it.dispatcher.in_flight, it.dispatcher.finished) == (0, 1)
    it.dispatcher.check()
    it.close()


async def test_who_waits_is_woken_when_a_place_is_given_back() -> None:
    it = pump()
    held = [await it.lease(arrival(f"h{n}")).__aenter__() for n in range(places(it))]
    order: list[str] = []

    async def waits(name: str) -> None:
        async with it.lease(arrival(name)):
            order.append(name)

    waiting = [asyncio.ensure_future(waits(f"r{n}")) for n in range(5)]
    await asyncio.sleep(0.02)
    assert it.dispatcher.queued == 5
    assert order == []
    for lease in held:
        await lease.__aexit__(None, None, None)
    await asyncio.gather(*waiting)
    assert order == [f"r{n}" for n in range(5)]
    it.dispatcher.check()
    it.close()


async def test_a_cancelled_wait_leaves_the_queue_and_never_takes_a_place() -> None:
    it = pump()
    held = [await it.lease(arrival(f"h{n}")).__aenter__() for n in range(places(it))]
    waiting = asyncio.ensure_future(it.lease(arrival("r")).__aenter__())
    await asyncio.sleep(0)
    assert it.dispatcher.queued == 1
    waiting.cancel()
    await asyncio.wait({waiting})
    assert (it.dispatcher.queued, it.dispatcher.cancelled) == (0, 1)
    for lease in held:
        await lease.__aexit__(None, None, None)
    assert it.dispatcher.in_flight == 0
    it.dispatcher.check()
    it.close()


async def test_a_wait_that_is_cancelled_as_it_is_granted_gives_the_place_back() -> None:
    it = pump()
    held = [await it.lease(arrival(f"h{n}")).__aenter__() for n in range(places(it))]
    waiting = asyncio.ensure_future(it.lease(arrival("r")).__aenter__())
    await asyncio.sleep(0)
    await held.pop().__aexit__(None, None, None)  # grants it, before its task runs again
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    assert it.dispatcher.in_flight == len(held)
    it.dispatcher.check()
    it.close()


async def test_a_refusal_at_the_door_is_raised_and_leaves_nothing() -> None:
    it = pump()
    with pytest.raises(Refused) as caught:
        await it.lease(arrival("r", adapter="nobody")).__aenter__()
    assert caught.value.why is RejectReason.UNKNOWN_MODEL
    it.dispatcher.check()
    assert it.forget(RequestId("r")) is False
    it.close()


async def test_time_alone_evicts_who_waited_too_long() -> None:
    it = pump(ttl_s=0.1)
    held = [await it.lease(arrival(f"h{n}")).__aenter__() for n in range(places(it))]
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(Refused) as caught:
        await it.lease(arrival("r")).__aenter__()
    assert caught.value.why is RejectReason.EXPIRED
    assert 0.09 < loop.time() - began < 0.5
    for lease in held:
        await lease.__aexit__(None, None, None)
    it.close()


async def test_time_alone_finds_a_silent_replica() -> None:
    it = pump()
    quiet = ScriptedReplica("quiet", heartbeat_s=0.05)
    it.replica_added(ReplicaId("quiet"))
    it.report(quiet.report())
    states = lambda: {one.replica: one.state for one in it.dispatcher.view(it.clock())}  # noqa: E731
    assert states()[ReplicaId("quiet")] == "up"
    await until(lambda: states()[ReplicaId("quiet")] == "lost", within_s=1)
    assert states()[REPLICA] == "up"
    it.close()


async def test_a_retry_goes_to_another_replica_and_counts_once() -> None:
    it = pump("replica-0", "replica-1")
    async with it.lease(arrival("r", adapter="a")) as lease:
        first = lease.placement.replica
        second = (await lease.retry(first, Conduct.GONE)).replica
        assert first != second
        with pytest.raises(Refused) as caught:
            await lease.retry(second, Conduct.BUSY)
        assert caught.value.why is RejectReason.NO_REPLICA
    it.dispatcher.check()
    assert (it.dispatcher.arrived, it.dispatcher.refused, it.dispatcher.finished) == (1, 1, 0)
    it.close()


@given(script=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), max_size=40))
async def test_every_arrival_ends_once_whatever_happens(script: list[tuple[int, int]]) -> None:
    """0: arrive. 1: end one. 2: cancel one. 3: lose or report a replica."""
    it = pump("replica-0", "replica-1")
    replicas = [ScriptedReplica(f"replica-{n}", adapters=("a",), heartbeat_s=60) for n in (0, 1)]
    tasks: list[asyncio.Task[None]] = []
    gates: list[asyncio.Event] = []

    async def request(lease: Lease, gate: asyncio.Event) -> None:
        try:
            async with lease:
                await gate.wait()
                lease.settle(1, 1)
        except Refused:
            pass

    for what, which in script:
        if what == 0:
            gates.append(asyncio.Event())
            lease = it.lease(arrival(f"r{len(gates)}", tenant=f"t{which % 2}", adapter="a"))
            tasks.append(asyncio.ensure_future(request(lease, gates[-1])))
        elif what == 3:
            one = replicas[which % 2]
            it.replica_lost(ReplicaId(one.name)) if which < 4 else it.report(one.report())
        elif gates:
            at = which % len(gates)
            gates[at].set() if what == 1 else tasks[at].cancel()
        await asyncio.sleep(0)
        it.dispatcher.check()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    it.dispatcher.check()
    assert it.dispatcher.queued == it.dispatcher.in_flight == 0
    it.close()


async def test_the_base_is_served_as_the_base() -> None:
    it = pump()
    async with it.lease(arrival("r")) as lease:
        assert lease.placement.digest == ""
    assert it.dispatcher.bases() == {BASE}
    it.close()
