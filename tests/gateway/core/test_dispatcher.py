"""Scenarios that a reader can follow: who is sent where, who waits, who is refused, and when."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from gateway.core.dispatcher import (
    Arrival,
    Conduct,
    Decision,
    Dispatch,
    Dispatcher,
    Evict,
    Kind,
    Reject,
    RejectReason,
    ReplicaState,
)
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

SETTINGS: dict[str, Any] = {
    "load_factor": 1.25, "load_floor": 8, "vnodes": 16, "service_s": 0.05, "host_load_s": 0.005,
    "disk_load_s": 0.15, "hop_s": 0.002, "per_tenant_max": 100, "ttl_s": 60.0, "input_weight": 1.0,
    "output_weight": 2.0, "warm_wait_s": 0.05, "silence_heartbeats": 3.0,
}  # fmt: skip
SQL, LEGAL = AdapterId("sql"), AdapterId("legal")
A, B = TenantId("a"), TenantId("b")


class Gate:
    """A dispatcher, a clock, and replicas that say what they are told to."""

    def __init__(self, **settings: Any) -> None:
        self.dispatcher = Dispatcher(**(SETTINGS | settings))
        self.now = 100.0
        self.ids = (RequestId(f"r{i}") for i in count())
        self.said: dict[ReplicaId, ReplicaReport] = {}

    def say(self, i: int, tiers: dict[AdapterId, Tier], **fields: Any) -> ReplicaId:
        """Replica i reports; what is not given is as it said before."""
        replica = ReplicaId(f"replica-{i}")
        fresh = ReplicaReport(
            replica=replica, boot="b", seq=0, base="base", slots=4, capacity=4, running=0,
            waiting=0, pages_total=1, pages_free=1, max_model_len=128, heartbeat_s=1.0,
        )  # fmt: skip
        before = self.said.get(replica, fresh)
        adapters = tuple(AdapterState(a, f"{a}-v1", tier) for a, tier in tiers.items())
        fields = {"adapters": adapters, "seq": before.seq + 1} | fields
        self.said[replica] = report = replace(before, **fields)
        self.dispatcher.replica_added(replica, self.now)
        assert self.dispatcher.report(report, self.now)
        return replica

    def arrive(
        self, tenant: TenantId, adapter: AdapterId | None = None, **fields: Any
    ) -> RequestId:
        request = next(self.ids)
        arrival = Arrival(request, tenant, 1.0, adapter, input_tokens=10, output_tokens=20)
        self.dispatcher.arrive(arrival._replace(**fields), self.now)
        return request

    def poll(self) -> list[Decision]:
        decisions = self.dispatcher.poll(self.now)
        self.dispatcher.check()
        return decisions

    def sent(self) -> dict[RequestId, str]:
        """Request -> 'replica kind' of a poll that decides nothing but dispatches."""
        decisions = self.poll()
        assert all(isinstance(d, Dispatch) for d in decisions), decisions
        return {
            d.request: f"{d.placement.replica[-1]} {d.placement.kind}"
            for d in decisions
            if isinstance(d, Dispatch)
        }

    def finish(self, request: RequestId) -> None:
        self.dispatcher.finish(request, 10, 20, self.now)

    def home(self, adapter: AdapterId) -> int:
        return int(self.dispatcher.explain(adapter, self.now)[0].replica[-1])


def test_a_request_goes_home_and_its_placement_says_so() -> None:
    gate = Gate()
    for i in range(3):
        gate.say(i, {SQL: Tier.GPU})
    request = gate.arrive(A, SQL)
    gate.now += 0.25
    (decision,) = gate.poll()
    assert isinstance(decision, Dispatch)
    assert decision.request == request
    assert decision.placement.kind == "home"
    assert decision.placement.digest == "sql-v1"
    assert decision.placement.queue_s == 0.25
    assert decision.placement.terms[0].replica == decision.placement.replica


def test_a_burst_waits_in_its_own_tenants_line() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    flood = [gate.arrive(A, SQL) for _ in range(64)]
    running = list(gate.sent())
    assert running == flood[:5]  # capacity 4 and one that travels
    light = gate.arrive(B, SQL)
    assert gate.sent() == {}
    gate.finish(running[0])
    assert list(gate.sent()) == [light]


def test_two_backlogged_tenants_take_turns() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    flood = {gate.arrive(A, SQL) for _ in range(40)}
    running = list(gate.sent())
    flood_b = {gate.arrive(B) for _ in range(40)}
    turns: list[RequestId] = []
    for _ in range(40):
        gate.now += 0.01
        gate.finish(running.pop(0))
        running += (new := list(gate.sent()))
        turns += new
    assert len(turns) == 40
    assert abs(len(flood_b & set(turns)) - len(flood & set(turns))) <= 5


def test_a_request_for_a_full_replica_does_not_block_its_tenants_other_adapter() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.say(1, {LEGAL: Tier.GPU})
    sql = [gate.arrive(A, SQL) for _ in range(7)]
    legal = gate.arrive(A, LEGAL)
    assert list(gate.sent()) == [*sql[:5], legal]
    gate.finish(sql[0])
    assert list(gate.sent()) == [sql[5]]


def test_a_head_waits_for_its_warm_replica_while_others_pass_but_not_for_long() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU, LEGAL: Tier.DISK})
    gate.say(1, {SQL: Tier.DISK, LEGAL: Tier.GPU})
    busy = [gate.arrive(A, SQL) for _ in range(5)]
    assert set(gate.sent().values()) <= {"0 home", "0 warm"}
    patient = gate.arrive(A, SQL)
    passing = gate.arrive(A, LEGAL)
    assert list(gate.sent()) == [passing]
    assert gate.dispatcher.next_wakeup(gate.now) == pytest.approx(
        gate.now + 0.2
    )  # it is full: four times as long
    gate.now += 0.199
    assert gate.sent() == {}
    gate.now += 0.0011
    kind = gate.sent()[patient]
    assert kind in ("1 spill", "1 cold")
    assert busy


def test_a_patient_head_takes_the_warm_place_that_comes_free() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.say(1, {SQL: Tier.DISK})
    busy = [gate.arrive(A, SQL) for _ in range(5)]
    gate.sent()
    patient = gate.arrive(B, SQL)
    assert gate.sent() == {}
    gate.now += 0.02
    gate.finish(busy[0])
    assert gate.sent()[patient][0] == "0"


def test_who_follows_a_load_under_way_does_not_wait_again() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.say(1, {SQL: Tier.DISK})
    [gate.arrive(A, SQL) for _ in range(5)]
    gate.sent()
    followers = [gate.arrive(B, SQL) for _ in range(3)]
    assert gate.sent() == {}
    gate.now += 0.201
    assert list(gate.sent()) == followers


def test_an_unknown_model_is_rejected_and_a_known_one_without_replica_too() -> None:
    gate = Gate()
    replica = gate.say(0, {SQL: Tier.GPU})
    unknown = gate.arrive(A, AdapterId("nope"))
    assert gate.poll() == [Reject(unknown, RejectReason.UNKNOWN_MODEL)]
    gate.dispatcher.replica_lost(replica, gate.now)
    assert gate.dispatcher.knows("sql")
    assert gate.dispatcher.adapters() == {}
    known, base = gate.arrive(A, SQL), gate.arrive(A)
    assert gate.poll() == [
        Reject(known, RejectReason.NO_REPLICA),
        Reject(base, RejectReason.NO_REPLICA),
    ]


def test_no_adapter_is_unknown_before_every_replica_has_spoken() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.dispatcher.replica_added(ReplicaId("replica-1"), gate.now)
    early = gate.arrive(A, LEGAL)
    assert gate.poll() == [Reject(early, RejectReason.NO_REPLICA)]
    gate.now += 2.9
    gate.say(0, {SQL: Tier.GPU})
    for _ in range(2):  # silent too long, and looked at once more
        gate.now += 0.1
        gate.poll()
    late = gate.arrive(A, LEGAL)
    assert gate.poll() == [Reject(late, RejectReason.UNKNOWN_MODEL)]


def test_an_adapter_that_failed_validation_is_not_routable() -> None:
    gate = Gate()
    bad = AdapterState(SQL, "d", Tier.DISK, AdapterStatus.FAILED, reason="rank over cap")
    replica = gate.say(0, {}, adapters=(bad,))
    request = gate.arrive(A, SQL)
    assert gate.poll() == [Reject(request, RejectReason.UNKNOWN_MODEL)]
    (view,) = gate.dispatcher.view(gate.now)
    assert (view.replica, view.adapters) == (replica, (bad,))
    assert view.by_tier()[Tier.DISK] == ()


def test_the_bound_of_a_tenants_line_is_its_own_or_the_common_one() -> None:
    gate = Gate(per_tenant_max=3)
    gate.say(0, {SQL: Tier.GPU})
    for _ in range(5):
        gate.arrive(A, SQL)
        gate.poll()
    queued = [gate.arrive(A, SQL) for _ in range(4)]
    assert gate.poll() == [Reject(queued[3], RejectReason.QUEUE_FULL)]
    own = [gate.arrive(B, SQL, queue_max=1) for _ in range(2)]
    assert gate.poll() == [Reject(own[1], RejectReason.QUEUE_FULL)]
    assert (gate.dispatcher.waiting(A), gate.dispatcher.waiting(B)) == (3, 1)


def test_who_waited_its_time_is_evicted_at_that_time() -> None:
    gate = Gate(ttl_s=5.0)
    gate.say(0, {SQL: Tier.GPU}, heartbeat_s=1000.0)
    for _ in range(5):
        gate.arrive(A, SQL)
        gate.poll()
    request = gate.arrive(A, SQL)
    decisions = gate.poll()
    while not decisions:
        wakeup = gate.dispatcher.next_wakeup(gate.now)
        assert wakeup is not None
        assert gate.now < wakeup <= 105.0
        gate.now = wakeup
        decisions = gate.poll()
    assert decisions == [Evict(request, RejectReason.EXPIRED)]
    assert gate.now == 105.0


def test_a_rerouted_request_goes_first_and_never_back() -> None:
    gate = Gate()
    for i in range(2):
        gate.say(i, {SQL: Tier.GPU})
    running = {gate.arrive(A, SQL): "" for _ in range(10)}
    running = gate.sent()
    waiting = gate.arrive(A, SQL)
    victim = next(r for r, where in running.items() if where[0] == str(gate.home(SQL)))
    home = ReplicaId(f"replica-{running[victim][0]}")
    gate.dispatcher.reroute(victim, home, gate.now, conduct=Conduct.GONE)
    assert gate.sent() == {}  # the other is full, home is suspect
    other = next(r for r, where in running.items() if where[0] != home[-1])
    gate.finish(other)
    assert list(gate.sent()) == [victim]
    gate.say(int(home[-1]), {SQL: Tier.GPU})  # it speaks again
    assert list(gate.sent()) == [waiting]


def test_a_refusal_by_an_answering_replica_does_not_make_it_suspect() -> None:
    gate = Gate()
    for i in range(2):
        gate.say(i, {SQL: Tier.GPU})
    request = gate.arrive(A, SQL)
    home = ReplicaId(f"replica-{gate.sent()[request][0]}")
    gate.dispatcher.reroute(request, home, gate.now, conduct=Conduct.BUSY)
    assert gate.sent()[request][0] != home[-1]
    assert gate.sent() == {}
    again = gate.arrive(A, SQL)
    assert gate.sent()[again][0] == home[-1]


def test_a_request_that_every_replica_failed_is_evicted_at_once() -> None:
    gate = Gate()
    for i in range(2):
        gate.say(i, {SQL: Tier.GPU})
    request = gate.arrive(A, SQL)
    for _ in range(2):
        replica = ReplicaId(f"replica-{gate.sent()[request][0]}")
        gate.dispatcher.reroute(request, replica, gate.now, conduct=Conduct.BUSY)
    assert gate.poll() == [Evict(request, RejectReason.NO_REPLICA)]


def test_the_loss_of_the_only_holder_evicts_those_who_wait_for_it() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.say(1, {LEGAL: Tier.GPU})
    sql = [gate.arrive(A, SQL) for _ in range(7)]
    legal = [gate.arrive(A, LEGAL) for _ in range(7)]
    gate.sent()
    gate.dispatcher.replica_lost(ReplicaId("replica-0"), gate.now)
    assert gate.poll() == [Evict(request, RejectReason.NO_REPLICA) for request in sql[5:]]
    assert gate.dispatcher.waiting(A) == len(legal) - 5
    for request in sql[:5]:
        gate.finish(request)
    gate.say(0, {SQL: Tier.GPU})
    gate.arrive(A, SQL)
    assert list(gate.sent().values()) == ["0 home"]


def test_silence_is_a_loss_without_any_event() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    wakeup = gate.dispatcher.next_wakeup(gate.now)
    assert wakeup is not None
    assert wakeup <= gate.now + 3.0
    began = gate.now
    for _ in range(2):  # silent too long, and looked at once more
        gate.now = gate.dispatcher.next_wakeup(gate.now) or 0
        assert gate.poll() == []
    assert began + 3.0 < gate.now < began + 3.1
    assert gate.dispatcher.view(gate.now)[0].state is ReplicaState.LOST


def test_a_draining_replica_takes_nothing_new_and_comes_back_on_resume() -> None:
    gate = Gate()
    for i in range(2):
        gate.say(i, {SQL: Tier.GPU})
    home = gate.home(SQL)
    gate.dispatcher.drain(ReplicaId(f"replica-{home}"), gate.now)
    gate.arrive(A, SQL)
    assert list(gate.sent().values()) == [f"{1 - home} home"]
    gate.dispatcher.resume(ReplicaId(f"replica-{home}"), gate.now)
    gate.arrive(A, SQL)
    assert list(gate.sent().values()) == [f"{home} home"]


def test_draining_the_last_replica_refuses_those_who_wait() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    queued = [gate.arrive(A, SQL) for _ in range(6)]
    gate.sent()
    gate.dispatcher.drain(ReplicaId("replica-0"), gate.now)
    assert gate.poll() == [Evict(queued[5], RejectReason.NO_REPLICA)]


def test_a_base_request_needs_no_adapter_and_waits_for_none() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.DISK})
    gate.say(1, {}, running=3)
    requests = [gate.arrive(A) for _ in range(4)]
    assert list(gate.sent().items()) == [(r, "0 home") for r in requests[:3]] + [
        (requests[3], "0 home")
    ]


def test_a_new_replica_helps_base_requests_that_wait() -> None:
    gate = Gate()
    gate.say(0, {})
    for _ in range(6):
        gate.arrive(A)
    assert len(gate.sent()) == 5
    gate.say(1, {})
    assert list(gate.sent().values()) == ["1 home"]


def test_a_replica_that_learns_an_adapter_helps_those_who_wait_for_it() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.say(1, {})
    for _ in range(6):
        gate.arrive(A, SQL)
    assert len(gate.sent()) == 5
    gate.say(1, {SQL: Tier.HOST})
    assert list(gate.sent().values()) in (["1 home"], ["1 warm"])


def test_a_cancelled_request_leaves_no_trace() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    requests = [gate.arrive(A, SQL) for _ in range(7)]
    gate.sent()
    for request in (requests[5], requests[0], requests[0], RequestId("nobody")):
        gate.dispatcher.cancel(request, gate.now)
    assert list(gate.sent()) == [requests[6]]
    counters = gate.dispatcher
    assert (counters.arrived, counters.finished, counters.cancelled) == (7, 1, 1)


def test_a_tenant_is_charged_what_its_requests_really_cost() -> None:
    """Equal estimates; A's requests end after a tenth of the tokens, so A has more turns."""
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    for _ in range(100):
        gate.arrive(A, SQL, output_tokens=100)
        gate.arrive(B, SQL, output_tokens=100)
    running, turns = list(gate.sent()), {"a": 0, "b": 0}
    for _ in range(88):
        request = running.pop(0)
        of_a = int(request[1:]) % 2 == 0
        turns["a" if of_a else "b"] += 1
        gate.dispatcher.finish(request, 10, 10 if of_a else 100, gate.now)
        running += gate.sent()
    assert turns["a"] > 5 * turns["b"]


def test_stale_reports_and_strangers_change_nothing() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    report = gate.said[ReplicaId("replica-0")]
    assert not gate.dispatcher.report(report, gate.now)
    assert not gate.dispatcher.report(replace(report, seq=0, adapters=()), gate.now)
    assert not gate.dispatcher.report(replace(report, replica=ReplicaId("x")), gate.now)
    assert gate.dispatcher.adapters() == {SQL: "sql-v1"}


def test_a_removed_replica_is_forgotten() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    request = gate.arrive(A, SQL)
    gate.sent()
    gate.dispatcher.replica_removed(ReplicaId("replica-0"), gate.now)
    assert gate.poll() == []
    assert not gate.dispatcher.knows("sql")
    assert gate.dispatcher.bases() == frozenset()
    gate.finish(request)
    gate.dispatcher.check()
    assert gate.dispatcher.in_flight == 0


def test_with_no_event_a_poll_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.say(1, {LEGAL: Tier.GPU})
    for i in range(90):
        gate.arrive(TenantId(f"t{i}"), SQL)
    gate.sent()

    def never(*_: object) -> None:
        raise AssertionError("a request was looked at again although nothing happened")

    monkeypatch.setattr(gate.dispatcher._router, "pick", never)
    assert gate.sent() == {}
    gate.arrive(TenantId("late"), SQL)  # of a key that is known to be stuck
    assert gate.sent() == {}


def test_every_kind_is_its_header() -> None:
    assert [str(kind) for kind in Kind] == ["home", "warm", "spill", "cold"]


def test_places_that_others_free_are_used_as_soon_as_they_are_reported() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU}, running=5)
    gate.say(1, {LEGAL: Tier.GPU})
    request = gate.arrive(A, SQL)
    assert gate.sent() == {}
    gate.say(0, {SQL: Tier.GPU}, running=0)
    assert list(gate.sent()) == [request]


def test_a_resumed_replica_helps_those_who_wait_for_it() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU}, running=5)
    gate.say(1, {SQL: Tier.GPU})
    gate.say(2, {LEGAL: Tier.GPU})
    gate.dispatcher.drain(ReplicaId("replica-1"), gate.now)
    request = gate.arrive(A, SQL)
    assert gate.sent() == {}
    gate.dispatcher.resume(ReplicaId("replica-1"), gate.now)
    assert list(gate.sent()) == [request]


def test_an_adapter_that_is_withdrawn_everywhere_is_unknown_to_those_who_wait() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU}, running=5)
    request = gate.arrive(A, SQL)
    assert gate.sent() == {}
    gate.say(0, {})
    assert gate.poll() == [Evict(request, RejectReason.UNKNOWN_MODEL)]


def test_time_on_a_replica_that_failed_is_no_wait_in_the_queue() -> None:
    gate = Gate(ttl_s=5.0)
    for i in range(2):
        gate.say(i, {SQL: Tier.GPU}, heartbeat_s=1000.0)
    request = gate.arrive(A, SQL)
    replica = ReplicaId(f"replica-{gate.sent()[request][0]}")
    gate.now += 30.0
    gate.dispatcher.reroute(request, replica, gate.now, conduct=Conduct.GONE)
    (decision,) = gate.poll()
    assert isinstance(decision, Dispatch)
    assert decision.placement.queue_s == 30.0


def test_a_rerouted_request_has_waited_enough_for_a_warm_place() -> None:
    gate = Gate()
    gate.say(0, {SQL: Tier.GPU})
    gate.say(1, {SQL: Tier.DISK})
    gate.say(2, {SQL: Tier.GPU})
    first = [gate.arrive(A, SQL) for _ in range(10)]
    running = gate.sent()
    assert {where[0] for where in running.values()} == {"0", "2"}
    victim = first[0]
    failed = ReplicaId(f"replica-{running[victim][0]}")
    gate.dispatcher.reroute(victim, failed, gate.now, conduct=Conduct.GONE)
    assert list(gate.sent()) == [victim]
