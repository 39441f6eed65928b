"""The short way of a request that finds nobody waiting is the long way, only shorter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.dispatcher import Arrival, Decision, Dispatch, Dispatcher, RejectReason
from gateway.core.fair_queue import FairQueue
from gateway.core.residency import ANY
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, ReplicaReport, Tier

SETTINGS: dict[str, Any] = {
    "load_factor": 1.25, "load_floor": 1, "vnodes": 8, "service_s": 0.05, "host_load_s": 0.005,
    "disk_load_s": 0.15, "hop_s": 0.002, "per_tenant_max": 4, "ttl_s": 60.0,
    "input_weight": 1.0, "output_weight": 2.0, "warm_wait_s": 0.05, "silence_heartbeats": 1e6,
}  # fmt: skip
NAMES = [AdapterId("sql"), AdapterId("poem")]
REPLICAS = [ReplicaId(f"replica-{i}") for i in range(3)]


def report(replica: ReplicaId, *states: AdapterState, seq: int = 1) -> ReplicaReport:
    return ReplicaReport(
        replica=replica, boot="b", seq=seq, base="base", slots=2, capacity=2, running=0, waiting=0,
        pages_total=1, pages_free=1, max_model_len=128, heartbeat_s=1.0, adapters=states,
    )  # fmt: skip


def fleet(tiers: list[list[Tier]], *, capacity: int = 2, reserve_share: float = 0.0) -> Dispatcher:
    core = Dispatcher(**SETTINGS, reserve_share=reserve_share, reserve_for_s=1.0)
    for replica, its in zip(REPLICAS, tiers, strict=True):
        core.replica_added(replica, 0.0)
        states = (AdapterState(n, "v", t) for n, t in zip(NAMES, its, strict=True))
        core.report(replace(report(replica, *states), capacity=capacity), 0.0)
    core.poll(0.0)
    return core


class Road:
    """A dispatcher, and the way requests take into it."""

    def __init__(self, core: Dispatcher, *, short: bool) -> None:
        self.core = core
        self.short = short
        self.took = 0

    def arrive(self, arrival: Arrival, now: float) -> list[Decision]:
        if self.short and (dispatch := self.core.place(arrival, now)) is not None:
            self.took += 1
            return [dispatch]
        self.core.arrive(arrival, now)
        return self.core.poll(now)


steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("arrive"), st.sampled_from("abc"), st.sampled_from([None, *NAMES, "made-up"])
        ),
        st.tuples(st.just("finish"), st.integers(0, 9), st.integers(0, 500)),
        st.tuples(st.just("wait"), st.floats(0, 0.2) | st.just(1.0), st.none()),
    ),
    max_size=60,
)


@given(
    tiers=st.lists(st.lists(st.sampled_from(Tier), min_size=2, max_size=2), min_size=3, max_size=3),
    steps=steps,
    size=st.sampled_from([{"capacity": 2}, {"capacity": 8, "reserve_share": 0.5}]),
)
def test_every_decision_is_the_one_of_the_long_way(
    tiers: list[list[Tier]], steps: list[tuple[str, Any, Any]], size: dict[str, Any]
) -> None:
    roads = [Road(fleet(tiers, **size), short=short) for short in (False, True)]
    now = 0.0
    flying: list[RequestId] = []
    for number, (what, this, that) in enumerate(steps):
        if what == "arrive":
            arrival = Arrival(RequestId(f"r{number}"), TenantId(this), 1.0, that, 10, 20)
            said = [road.arrive(arrival, now) for road in roads]
        elif what == "finish" and flying:
            request = flying.pop(this % len(flying))
            for road in roads:
                road.core.finish(request, 10, that, now)
            said = [road.core.poll(now) for road in roads]
        else:
            now += this if what == "wait" else 0.0
            said = [road.core.poll(now) for road in roads]
        assert _told(said[0]) == _told(said[1])
        flying += [one.request for one in said[0] if isinstance(one, Dispatch)]
        for road in roads:
            road.core.check()


def _told(decisions: list[Decision]) -> list[Any]:
    """With the terms as they were when it was decided."""
    return [
        (one.request, one.placement.queue_s, one.placement.kind, one.placement.terms)
        if isinstance(one, Dispatch)
        else one
        for one in decisions
    ]


def test_the_usual_request_takes_the_short_way() -> None:
    road = Road(fleet([[Tier.GPU] * 2] * 3), short=True)
    for number in range(6):
        road.arrive(Arrival(RequestId(f"{number}"), TenantId("a"), 1.0, NAMES[0], 1, 1), 0.0)
    assert road.took == 6


def test_nobody_passes_one_who_waits() -> None:
    road = Road(fleet([[Tier.GPU] * 2] * 3), short=True)
    for number in range(12):
        road.arrive(Arrival(RequestId(f"{number}"), TenantId("a"), 1.0, NAMES[0], 1, 1), 0.0)
    waiting = road.core.queued
    assert waiting > 0
    late = Arrival(RequestId("late"), TenantId("b"), 1.0, None, 1, 1)
    assert road.core.place(late, 0.0) is None
    road.core.check()


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(1, 100), st.floats(0, 100))))
def test_to_pass_through_an_empty_queue_is_to_push_and_pop(
    turns: list[tuple[str, float, float]],
) -> None:
    long, short = FairQueue[str](lag_max=1e9), FairQueue[str](lag_max=1e9)
    for number, (tenant, cost, actual) in enumerate(turns):
        request, who = RequestId(f"r{number}"), TenantId(tenant)
        common: dict[str, Any] = {"tenant": who, "weight": 2.0, "key": "k", "cost": cost}
        assert long.push(request, waiting_max=9, **common)
        long.pop(request)
        short.pass_through(request, **common)
        if number % 3:
            long.settle(request, actual)
            short.settle(request, actual)
        assert _books(long) == _books(short)
        long.check()
        short.check()


def _books(queue: FairQueue[str]) -> tuple[Any, ...]:
    kept = {t: (m.level, m.unsettled, m.in_flight) for t, m in queue._tenants.items()}
    return kept, queue._present


# Replicas that take every name ------------------------------------------------------------------


def test_a_replica_that_takes_any_name_serves_those_that_nobody_names() -> None:
    core = Dispatcher(**SETTINGS)
    for replica in REPLICAS[:2]:
        core.replica_added(replica, 0.0)
    core.report(report(REPLICAS[0], AdapterState(ANY, "", Tier.GPU)), 0.0)
    core.report(report(REPLICAS[1], AdapterState(NAMES[0], "v", Tier.DISK)), 0.0)
    core.poll(0.0)
    assert core.knows("never-heard-of")
    assert core.adapters() == {NAMES[0]: "v"}, "a name for all names is no model"
    for name, wanted in ((AdapterId("never-heard-of"), REPLICAS[0]), (NAMES[0], REPLICAS[1])):
        request = Arrival(RequestId(name), TenantId("a"), 1.0, name, 1, 1)
        dispatch = core.place(request, 0.0)
        assert dispatch is not None
        assert dispatch.placement.replica == wanted
    core.check()


def test_without_such_a_replica_an_unknown_name_stays_unknown() -> None:
    core = fleet([[Tier.GPU] * 2] * 3)
    assert not core.knows("never-heard-of")
    request = Arrival(RequestId("r"), TenantId("a"), 1.0, AdapterId("never-heard-of"), 1, 1)
    assert core.place(request, 0.0) is None
    core.arrive(request, 0.0)
    (refusal,) = core.poll(0.0)
    assert refusal.why is RejectReason.UNKNOWN_MODEL  # type: ignore[union-attr]


def test_a_lost_server_of_any_name_is_away_not_ignorant() -> None:
    core = Dispatcher(**SETTINGS)
    core.replica_added(REPLICAS[0], 0.0)
    core.report(report(REPLICAS[0], AdapterState(ANY, "", Tier.GPU)), 0.0)
    core.replica_lost(REPLICAS[0], 1.0)
    assert core.knows("anything")
