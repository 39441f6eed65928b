from __future__ import annotations

import math

from gateway.core.parking import Key, Parking
from shared.ids import AdapterId, ReplicaId

R0, R1, R2 = (ReplicaId(f"replica-{i}") for i in range(3))
SQL: Key = (AdapterId("sql"), frozenset())
BASE: Key = (None, frozenset())


def test_a_stuck_key_waits_for_a_place_on_a_replica_it_wants() -> None:
    parking = Parking()
    parking.stick(SQL, frozenset({R0, R1}))
    assert parking.stuck(SQL)
    assert parking.wake({R2}, {AdapterId("legal")}, 1e9) == []
    assert parking.wake({R1}, (), 0) == [SQL]
    assert not parking.stuck(SQL)
    assert not parking


def test_a_report_that_brings_the_adapter_nearer_wakes_it() -> None:
    parking = Parking()
    parking.stick(SQL, frozenset({R0}))
    assert parking.wake((), {AdapterId("sql")}, 0) == [SQL]


def test_the_base_is_helped_by_any_place() -> None:
    parking = Parking()
    parking.stick(BASE, frozenset())
    assert parking.wake({R2}, (), 0) == [BASE]


def test_patience_ends_at_its_moment_and_is_told_once() -> None:
    parking = Parking()
    parking.be_patient(SQL, frozenset({R0}), until=5.0)
    parking.be_patient(SQL, frozenset({R1}), until=3.0)
    parking.check()
    assert not parking.stuck(SQL)
    assert parking.next_moment() == 3.0
    assert parking.wake((), (), 2.9) == []
    assert parking.wake((), (), 3.0) == [SQL]
    assert parking.next_moment() == math.inf
    assert parking.wake({R0, R1}, (), 9.0) == []


def test_a_patient_key_can_become_stuck() -> None:
    parking = Parking()
    parking.be_patient(SQL, frozenset({R0}), until=5.0)
    parking.stick(SQL, frozenset({R0, R1}))
    assert parking.stuck(SQL)
    assert parking.wake({R1}, (), 0) == [SQL]
