"""The fleet's life cycle, its places, and its leases."""

from __future__ import annotations

import pytest

from gateway.core.fleet import Conduct, Fleet, ReplicaState
from gateway.core.silence import FIRST_HEARTBEAT_S, LOOK_S
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import ReplicaReport

R0, R1 = ReplicaId("replica-0"), ReplicaId("replica-1")
SQL = AdapterId("sql")


def report(
    replica: ReplicaId = R0,
    *,
    running: int = 0,
    waiting: int = 0,
    capacity: int = 8,
    heartbeat_s: float = 1.0,
    draining: bool = False,
    base: str = "base",
) -> ReplicaReport:
    return ReplicaReport(
        replica=replica, boot="b", seq=1, base=base, slots=4, capacity=capacity, running=running,
        waiting=waiting, pages_total=1, pages_free=1, max_model_len=128, heartbeat_s=heartbeat_s,
        draining=draining,
    )  # fmt: skip


def fleet_of(*replicas: ReplicaId, heard: bool = True) -> Fleet:
    fleet = Fleet(service_s=0.05, silence_heartbeats=3)
    for replica in replicas:
        fleet.add(replica, 0)
        if heard:
            fleet.report(report(replica), 0)
    return fleet


def test_a_replica_is_open_from_its_first_report_on() -> None:
    fleet = fleet_of(R0, heard=False)
    assert fleet.replicas[R0].state is ReplicaState.UNKNOWN
    assert fleet.incomplete
    assert not fleet.open
    fleet.report(report(), 0)
    assert fleet.replicas[R0].state is ReplicaState.UP
    assert set(fleet.open) == {R0}


def test_silence_for_three_heartbeats_is_due_once_and_never_late() -> None:
    fleet = fleet_of(R0, R1)
    fleet.report(report(R1, heartbeat_s=0.5), 1.0)
    assert fleet.silence.due <= 2.5
    assert fleet.silence.silent(2.4) == []
    assert fleet.silence.silent(2.5) == []  # a report may lie unread
    assert fleet.silence.due == 2.5 + LOOK_S
    assert fleet.silence.silent(2.5 + LOOK_S) == [R1]
    fleet.lose(R1, 2.6)
    assert fleet.silence.due == 3.0
    assert fleet.silence.silent(3.0) == []
    assert fleet.silence.silent(3.0 + LOOK_S) == [R0]
    fleet.lose(R0, 3.1)
    assert fleet.silence.silent(1e9) == []


def test_a_replica_that_never_speaks_is_lost() -> None:
    fleet = fleet_of(R0, heard=False)
    assert fleet.silence.silent(3 * FIRST_HEARTBEAT_S) == []
    assert fleet.silence.silent(3 * FIRST_HEARTBEAT_S + LOOK_S) == [R0]


def test_a_lost_replica_is_back_with_its_next_report() -> None:
    fleet = fleet_of(R0)
    fleet.lose(R0, 50.0)
    assert not fleet.open
    fleet.report(report(), 100.0)
    assert set(fleet.open) == {R0}
    assert fleet.silence.due <= 103.0


def test_a_suspect_gets_nothing_until_it_speaks_again() -> None:
    fleet = fleet_of(R0)
    fleet.begin(RequestId("r0"), R0, SQL, 0)
    fleet.finish(RequestId("r0"), 0, Conduct.GONE)
    assert not fleet.open
    assert fleet.hopeful(R0)
    fleet.drain(R0, on=False, now=0)  # an operator does not clear a suspicion
    assert fleet.replicas[R0].state is ReplicaState.SUSPECT
    fleet.report(report(), 1.0)
    assert set(fleet.open) == {R0}


def test_draining_is_the_operators_word_or_the_replicas_own() -> None:
    fleet = fleet_of(R0)
    fleet.drain(R0, on=True, now=0)
    fleet.report(report(), 1.0)
    assert fleet.replicas[R0].state is ReplicaState.DRAINING
    fleet.report(report(draining=True), 2.0)
    fleet.drain(R0, on=False, now=0)
    assert fleet.replicas[R0].state is ReplicaState.DRAINING
    fleet.report(report(), 3.0)
    assert fleet.replicas[R0].state is ReplicaState.UP


def test_a_replica_is_full_a_little_above_its_capacity() -> None:
    fleet = fleet_of(R0)
    for i in range(9):  # 8 and an overlap of 1
        assert R0 in fleet.open
        fleet.begin(RequestId(f"r{i}"), R0, SQL, 0)
    assert R0 not in fleet.open
    fleet.check()
    fleet.finish(RequestId("r0"), 0)
    assert R0 in fleet.open


def test_requests_of_others_take_places_too() -> None:
    fleet = fleet_of(R0)
    fleet.begin(RequestId("r0"), R0, None, 0)
    fleet.report(report(running=8, waiting=1), 0)
    assert R0 not in fleet.open
    fleet.finish(RequestId("r0"), 0)
    assert fleet.replicas[R0].load == 8
    fleet.report(report(running=0), 0)
    assert fleet.replicas[R0].load == 0


def test_a_report_older_than_a_dispatch_does_not_hide_it() -> None:
    fleet = fleet_of(R0)
    fleet.begin(RequestId("r0"), R0, None, 0)
    fleet.report(report(running=0), 0)
    assert fleet.replicas[R0].load == 1


def test_a_lease_ends_once() -> None:
    fleet = fleet_of(R0)
    fleet.begin(RequestId("r0"), R0, SQL, 0)
    assert fleet.finish(RequestId("r0"), 0) == R0
    assert fleet.finish(RequestId("r0"), 0) is None
    fleet.check()
    assert fleet.replicas[R0].in_flight == 0
    assert not fleet.replicas[R0].ours


def test_a_lease_of_a_removed_replica_leaves_its_namesake_alone() -> None:
    fleet = fleet_of(R0)
    fleet.begin(RequestId("r0"), R0, SQL, 0)
    fleet.remove(R0, 0)
    fleet.add(R0, 1)
    fleet.report(report(), 1)
    fleet.begin(RequestId("r1"), R0, SQL, 1)
    fleet.finish(RequestId("r0"), 1)
    fleet.check()
    assert fleet.replicas[R0].in_flight == 1


def test_a_full_replica_teaches_how_long_a_place_takes() -> None:
    fleet = fleet_of(R0)
    now = 0.0
    for i in range(9):
        fleet.begin(RequestId(f"r{i}"), R0, None, now)
    for i in range(200):
        now += 0.4
        fleet.finish(RequestId(f"r{i}"), now)
        fleet.begin(RequestId(f"r{i + 9}"), R0, None, now)
    assert fleet.replicas[R0].service_s == pytest.approx(0.4, rel=0.01)


def test_an_idle_replica_teaches_nothing() -> None:
    fleet = fleet_of(R0)
    for i in range(20):
        fleet.begin(RequestId(f"r{i}"), R0, None, float(i))
        fleet.finish(RequestId(f"r{i}"), i + 0.5)
    assert fleet.replicas[R0].service_s == 0.05


def test_the_bases_are_what_the_replicas_call_them() -> None:
    fleet = fleet_of(R0, R1)
    fleet.report(report(R1, base="other"), 0)
    assert fleet.bases == {"base", "other"}
    fleet.remove(R1, 0)
    assert fleet.bases == {"base"}
