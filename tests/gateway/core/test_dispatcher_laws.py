"""The dispatcher's laws, under any order of events.

Every request is in one place and has one outcome; nothing goes where it may not; after a poll
nobody is left waiting who could be placed, but for those who wait for a warm place and may; nobody
is passed on the way into a replica's last places; and between polls nothing was due.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.breaker import HealthRules
from gateway.core.dispatcher import (
    Arrival,
    Conduct,
    Dispatch,
    Dispatcher,
    Evict,
    Kind,
    Placement,
    Reject,
    RejectReason,
    ReplicaState,
)
from gateway.core.parking import Key
from gateway.core.reserve import NONE
from gateway.core.terms import WHILE_FULL
from gateway.core.waiting_room import Ticket
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

WARM_WAIT_S, TTL_S, PER_TENANT_MAX = 0.05, 2.0, 6
SETTINGS: dict[str, Any] = {
    "load_factor": 1.25, "load_floor": 2, "vnodes": 8, "service_s": 0.05, "host_load_s": 0.005,
    "disk_load_s": 0.15, "hop_s": 0.002, "per_tenant_max": PER_TENANT_MAX, "ttl_s": TTL_S,
    "input_weight": 1.0, "output_weight": 2.0, "warm_wait_s": WARM_WAIT_S,
    "silence_heartbeats": 3.0,
    "health": HealthRules(
        failures=2, ejection_s=0.5, ejection_max_s=4.0, slow_samples=2, slow_s=0.1, window_s=1.0,
        slow_start_s=2.0,
    ),
}  # fmt: skip
REPLICAS = [ReplicaId(f"replica-{i}") for i in range(4)]
ADAPTERS = [AdapterId("sql"), AdapterId("legal"), AdapterId("poem")]
TENANTS = [TenantId("a"), TenantId("b"), TenantId("c")]

replicas = st.sampled_from(REPLICAS)
conducts = st.none() | st.sampled_from(Conduct)
contents = st.lists(
    st.builds(
        AdapterState,
        adapter=st.sampled_from(ADAPTERS),
        digest=st.sampled_from(["v1", "v2"]),
        tier=st.sampled_from(Tier),
        status=st.sampled_from([AdapterStatus.READY] * 3 + list(AdapterStatus)),
        running=st.integers(0, 1),
    ),
    unique_by=lambda s: s.adapter,
    min_size=1,
).map(tuple)


class Watched(Dispatcher):
    """Says when somebody is passed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.parked: dict[tuple[TenantId, Key], float] = {}
        self.reached = 0

    def _place(self, ticket: Ticket, now: float) -> Dispatch | None:
        tag, before = self._room.turn, {r: x.load for r, x in self._fleet.replicas.items()}
        dispatch = super()._place(ticket, now)
        if dispatch is None:
            self.parked[ticket.arrival.tenant, ticket.key] = tag
            return None
        replica = self._fleet.replicas[dispatch.placement.replica]
        if before[replica.id] >= replica.common:  # one of its last
            self.reached += 1
            waits, tenants = self._room._parking._waits, self._room._queue._tenants
            for (tenant, key), its in self.parked.items():
                line = tenants[tenant].lines.get(key) if tenant in tenants else None
                if line is not None and line.parked and replica.id in waits[key].wanted:
                    assert tag <= its, f"{tenant} was passed"
        return dispatch


class DispatcherMachine(RuleBasedStateMachine):
    setting: ClassVar[dict[str, Any]] = SETTINGS
    capacities = 1

    def __init__(self) -> None:
        super().__init__()
        self.core = Watched(**self.setting)
        self.now = 1000.0
        self.count = 0
        self.seq = 0
        self.queued: dict[RequestId, Arrival] = {}
        self.flying: dict[RequestId, tuple[Arrival, Placement]] = {}
        self.tried: dict[RequestId, set[ReplicaId]] = {}
        self.ended: dict[RequestId, str] = {}
        self.polled = False
        self.boots: dict[ReplicaId, str] = {}

    # -- the fleet

    @initialize(adapters=contents, capacity=st.integers(1, 6))
    def begin(self, adapters: tuple[AdapterState, ...], capacity: int) -> None:
        for replica in REPLICAS[:2]:
            self.core.replica_added(replica, self.now)
            self.report(replica, adapters, capacity, running=0, waiting=0, draining=False)

    @rule(replica=replicas)
    def add(self, replica: ReplicaId) -> None:
        self.event()
        self.core.replica_added(replica, self.now)

    @rule(replica=replicas)
    def remove(self, replica: ReplicaId) -> None:
        self.event()
        self.core.replica_removed(replica, self.now)
        self.boots.pop(replica, None)

    @rule(
        replica=replicas,
        adapters=contents,
        capacity=st.integers(1, 6),
        running=st.integers(0, 3),
        waiting=st.integers(0, 1),
        draining=st.sampled_from([False] * 4 + [True]),
        boot=st.sampled_from(["b"] * 6 + ["c", "d"]),
    )
    def report(
        self,
        replica: ReplicaId,
        adapters: tuple[AdapterState, ...],
        capacity: int,
        running: int,
        waiting: int,
        draining: bool,
        boot: str = "b",
    ) -> None:
        self.event()
        self.seq += 1
        capacity *= self.capacities
        report = ReplicaReport(
            replica=replica, boot=boot, seq=self.seq, base="base", slots=2, capacity=capacity,
            running=running, waiting=waiting, pages_total=1, pages_free=1, max_model_len=128,
            heartbeat_s=1.0, draining=draining, adapters=adapters,
        )  # fmt: skip
        added = any(view.replica == replica for view in self.core.view(self.now))
        news = self.core.report(report, self.now)
        assert news == added or boot != self.boots.get(
            replica, boot
        )  # a replaced boot says nothing
        if news:
            self.boots[replica] = boot

    @rule(replica=replicas)
    def lose(self, replica: ReplicaId) -> None:
        self.event()
        self.core.replica_lost(replica, self.now)

    @rule(replica=replicas, on=st.booleans())
    def drain(self, replica: ReplicaId, on: bool) -> None:
        self.event()
        (self.core.drain if on else self.core.resume)(replica, self.now)

    # -- requests

    @rule(
        tenant=st.sampled_from(TENANTS),
        adapter=st.sampled_from([None, *ADAPTERS]),
        burst=st.integers(1, 4),
        tokens=st.integers(0, 50),
        streams=st.booleans(),
    )
    def arrive(
        self, tenant: TenantId, adapter: AdapterId | None, burst: int, tokens: int, streams: bool
    ) -> None:
        self.event()
        for _ in range(burst * self.capacities):
            self.count += 1
            arrival = Arrival(
                RequestId(f"r{self.count}"), tenant, 1.0, adapter, tokens, tokens, streams=streams
            )
            self.core.arrive(arrival, self.now)
            self.queued[arrival.request] = arrival
            self.tried[arrival.request] = set()

    @precondition(lambda self: self.queued or self.flying or self.ended)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.event()
        request = data.draw(st.sampled_from(sorted([*self.queued, *self.flying, *self.ended])))
        cancelled = self.core.cancelled
        self.core.cancel(request, self.now)
        if self.core.cancelled > cancelled:
            del self.queued[request]
            self.ended[request] = "cancelled"
        elif request in self.flying:
            del self.flying[request]
            self.ended[request] = "finished"

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.flying)))
        if self.core.answered(request, self.now):
            self.event()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), tokens=st.none() | st.integers(0, 500), conduct=conducts)
    def finish(self, data: st.DataObject, tokens: int | None, conduct: Conduct | None) -> None:
        self.event()
        request = data.draw(st.sampled_from(sorted(self.flying)))
        for _ in range(2):  # the second time is harmless
            self.core.finish(request, tokens, tokens, self.now, conduct)
        del self.flying[request]
        self.ended[request] = "finished"

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), conduct=conducts)
    def reroute(self, data: st.DataObject, conduct: Conduct | None) -> None:
        self.event()
        request = data.draw(st.sampled_from(sorted(self.flying)))
        arrival, placement = self.flying.pop(request)
        self.core.reroute(request, placement.replica, self.now, conduct=conduct)
        self.queued[request] = arrival
        self.tried[request].add(placement.replica)

    # -- time

    def event(self) -> None:
        self.polled = False

    @rule()
    def poll(self) -> None:
        views = {view.replica: view for view in self.core.view(self.now)}
        for decision in self.core.poll(self.now):
            arrival = self.queued.pop(decision.request)  # one outcome, of one who waits
            match decision:
                case Dispatch(request, placement):
                    self.flying[request] = (arrival, placement)
                    assert placement.replica not in self.tried[request]
                    view = views[placement.replica]
                    if view.state is not ReplicaState.UP:  # on trial, or about to be
                        assert view.state in (ReplicaState.HALF_OPEN, ReplicaState.EJECTED)
                    served = {s.adapter: s for s in view.adapters}
                    if arrival.adapter is not None:
                        state = served[arrival.adapter]
                        assert state.status is not AdapterStatus.FAILED
                        assert placement.digest == state.digest
                        from_disk = state.tier is Tier.DISK
                        assert (placement.kind in (Kind.SPILL, Kind.COLD)) == from_disk
                case Reject(request, why) | Evict(request, why):
                    self.ended[request] = why
                    assert (why is RejectReason.QUEUE_FULL) <= isinstance(decision, Reject)
        self.polled = True
        self.nobody_waits_who_could_be_placed()

    @rule(share=st.floats(0, 0.999))
    def sleep(self, share: float) -> None:
        """Before the wake-up that was asked for, a poll has nothing to do."""
        self.poll()
        wakeup = self.core.next_wakeup(self.now)
        assert wakeup is None or wakeup > self.now
        until = self.now + 1e6 if wakeup is None else wakeup
        self.now = min(self.now + share * (until - self.now), until - 1e-9)
        states = [view.state for view in self.core.view(self.now)]
        assert self.core.poll(self.now) == []
        assert [view.state for view in self.core.view(self.now)] == states
        if wakeup is not None:
            self.now = wakeup
            self.poll()

    def nobody_waits_who_could_be_placed(self) -> None:
        for key in self.core._room._queue.all_keys():
            choice = self.core._router.pick(*key, self.now, claim=NONE)
            heads: dict[TenantId, RequestId] = {}
            for request in self.core._room._queue.of_key(key):
                heads.setdefault(self.queued[request].tenant, request)
            for request in heads.values() if choice is not None else ():
                turn = self.core._room._tickets[request].first_turn_at
                assert turn is not None, f"{request} was never offered a place"
                assert self.now < turn + WHILE_FULL * WARM_WAIT_S, (
                    f"{request} was patient for too long"
                )
                assert not self.tried[request]
            assert self.core._router.hope(*key), f"{key} can never be placed"

    # -- always

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        self.core.check()
        assert self.core.arrived == self.count
        assert self.core.in_flight == len(self.flying)
        if self.polled:
            assert self.core.queued == len(self.queued)

    @invariant()
    def no_replica_is_above_its_limit_by_our_doing(self) -> None:
        ours: dict[ReplicaId, int] = {}
        for _, placement in self.flying.values():
            ours[placement.replica] = ours.get(placement.replica, 0) + 1
        for view in self.core.view(self.now):
            assert view.in_flight <= ours.get(view.replica, 0)


TestDispatcherMachine = DispatcherMachine.TestCase
TestDispatcherMachine.settings = settings(stateful_step_count=40)


class ReserveMachine(DispatcherMachine):
    """The same with last places that are kept."""

    setting: ClassVar[dict[str, Any]] = SETTINGS | {
        "reserve_share": 0.25, "reserve_for_s": 1.0, "per_tenant_max": 60, "load_floor": 4,
    }  # fmt: skip
    capacities = 4


TestReserveMachine = ReserveMachine.TestCase
TestReserveMachine.settings = settings(stateful_step_count=40)
