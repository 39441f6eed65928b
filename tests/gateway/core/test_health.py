"""Ejection, trial, readmission and slow start, in a fleet."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.breaker import HealthRules
from gateway.core.fleet import Conduct, Fleet, ReplicaState
from gateway.core.health import Standing
from gateway.core.silence import LOOK_S
from shared.ids import ReplicaId, RequestId
from shared.messages import ReplicaReport

WELL, FAULTY, GONE, BUSY = Conduct.WELL, Conduct.FAULTY, Conduct.GONE, Conduct.BUSY
RULES = HealthRules(
    failures=3, ejection_s=2, ejection_max_s=16, slow_samples=4, window_s=5, slow_start_s=8
)


class Fleets:
    """A fleet, a clock, and requests that go where the test says."""

    def __init__(self, size: int, capacity: int = 32) -> None:
        self.fleet = Fleet(service_s=0.05, silence_heartbeats=3, rules=RULES)
        self.now = 0.0
        self.ids = (RequestId(f"r{n}") for n in count())
        self.capacity = capacity
        for n in range(size):
            self.fleet.add(self.name(n), 0)
            self.report(n)

    def name(self, n: int) -> ReplicaId:
        return ReplicaId(f"replica-{n}")

    def report(self, n: int, boot: str = "b", draining: bool = False) -> None:
        report = ReplicaReport(
            replica=self.name(n), boot=boot, seq=0, base="base", slots=4, capacity=self.capacity,
            running=0, waiting=0, pages_total=1, pages_free=1, max_model_len=128, heartbeat_s=1,
            draining=draining,
        )  # fmt: skip
        self.fleet.report(report, self.now)

    def state(self, n: int) -> ReplicaState:
        return self.fleet.replicas[self.name(n)].state

    def limit(self, n: int) -> int:
        return self.fleet.replicas[self.name(n)].limit

    def begin(self, n: int, *, streams: bool = False) -> RequestId:
        request = next(self.ids)
        self.fleet.begin(request, self.name(n), None, self.now, streams=streams)
        return request

    def end(self, request: RequestId, conduct: Conduct | None) -> None:
        self.fleet.finish(request, self.now, conduct)
        self.fleet.check()

    def serve(self, n: int, *conducts: Conduct | None) -> None:
        for conduct in conducts:
            self.end(self.begin(n), conduct)

    def pass_s(self, seconds: float) -> None:
        """Time alone."""
        until = self.now + seconds
        while self.fleet.health.due <= until:
            self.now = self.fleet.health.due
            self.fleet.health.advance(self.now)
        self.now = until
        self.fleet.health.advance(until)
        self.fleet.check()

    def told(self) -> list[str]:
        news, self.fleet.health.news[:] = [*self.fleet.health.news], []
        return [f"{verdict.replica[-1]} {verdict.standing} {verdict.why}" for verdict in news]


def test_failures_in_a_row_eject_and_any_success_between_them_does_not() -> None:
    it = Fleets(3)
    it.serve(0, FAULTY, FAULTY, WELL, FAULTY, FAULTY, BUSY, None)
    assert it.state(0) is ReplicaState.UP
    it.serve(0, FAULTY)
    assert it.state(0) is ReplicaState.EJECTED
    assert it.name(0) not in it.fleet.open
    assert it.told() == ["0 ejected failures"]
    it.report(0)  # speaking does not end it
    assert it.state(0) is ReplicaState.EJECTED


def test_after_its_time_one_request_at_a_time_is_its_trial() -> None:
    it = Fleets(3)
    it.serve(0, FAULTY, FAULTY, FAULTY)
    it.pass_s(1.99)
    assert it.state(0) is ReplicaState.EJECTED
    it.pass_s(0.01)
    assert it.state(0) is ReplicaState.HALF_OPEN
    trial = it.begin(0)
    assert it.name(0) not in it.fleet.open
    it.end(trial, None)  # its client left: that told nothing
    assert it.name(0) in it.fleet.open
    it.serve(0, WELL)
    assert it.state(0) is ReplicaState.UP
    assert it.told() == ["0 ejected failures", "0 half_open failures", "0 readmitted failures"]


def test_a_failed_trial_ejects_for_longer() -> None:
    it = Fleets(3)
    it.serve(0, FAULTY, FAULTY, FAULTY)
    it.pass_s(2)
    it.serve(0, FAULTY)
    assert it.state(0) is ReplicaState.EJECTED
    it.pass_s(3.9)
    assert it.state(0) is ReplicaState.EJECTED
    it.pass_s(0.1)
    assert it.state(0) is ReplicaState.HALF_OPEN


def test_the_first_token_of_a_trial_readmits_and_one_failure_then_ejects() -> None:
    it = Fleets(3)
    it.serve(0, FAULTY, FAULTY, FAULTY)
    it.pass_s(2)
    trial = it.begin(0, streams=True)
    it.fleet.answered(trial, it.now)
    assert it.state(0) is ReplicaState.UP
    it.end(trial, FAULTY)  # it died in mid stream
    assert it.state(0) is ReplicaState.EJECTED


def test_an_old_requests_end_says_nothing_of_one_that_is_out() -> None:
    it = Fleets(3)
    old = [it.begin(0) for _ in range(4)]
    it.serve(0, FAULTY, FAULTY, FAULTY)
    it.end(old[0], WELL)
    assert it.state(0) is ReplicaState.EJECTED
    it.pass_s(2)
    it.end(old[1], WELL)
    it.end(old[2], FAULTY)
    assert it.state(0) is ReplicaState.HALF_OPEN


def test_many_connections_that_break_at_once_are_one_failure() -> None:
    it = Fleets(3)
    for request in [it.begin(0) for _ in range(20)]:
        it.end(request, GONE)
    assert it.state(0) is ReplicaState.SUSPECT
    it.report(0)
    assert it.state(0) is ReplicaState.UP


def test_one_that_speaks_but_refuses_connections_is_ejected_in_the_end() -> None:
    it = Fleets(3)
    for _ in range(RULES.failures):
        it.serve(0, GONE)
        it.report(0)
    assert it.state(0) is ReplicaState.EJECTED


@pytest.mark.parametrize(("size", "most"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_never_more_than_half_of_the_fleet_is_out(size: int, most: int) -> None:
    it = Fleets(size)
    for n in range(size):
        it.serve(n, *[FAULTY] * RULES.failures)
    assert sum(it.state(n) is ReplicaState.EJECTED for n in range(size)) == most


def test_a_loss_brings_the_ejected_back_early() -> None:
    it = Fleets(4)
    for n in (0, 1):
        it.serve(n, FAULTY, FAULTY, FAULTY)
        it.pass_s(0.1)
    it.fleet.lose(it.name(3), it.now)
    assert [it.state(n) for n in (0, 1)] == [ReplicaState.UP, ReplicaState.EJECTED]
    it.fleet.drain(it.name(2), on=True, now=it.now)
    it.fleet.check()


def test_a_slow_one_is_ejected_at_the_next_judgement() -> None:
    it = Fleets(3)
    for n, took_s in ((0, 0.1), (1, 0.1), (2, 4.0)):
        requests = [it.begin(n, streams=True) for _ in range(6)]
        it.pass_s(took_s)
        for request in requests:
            it.fleet.answered(request, it.now)
            it.end(request, WELL)
    it.fleet.health.judge(it.now)
    assert it.state(2) is ReplicaState.EJECTED
    assert it.told() == ["2 ejected slow"]


def test_a_frozen_one_that_still_reports_is_ejected_as_slow() -> None:
    it = Fleets(3)
    it.fleet.health.judge(it.now)
    stuck = [it.begin(2, streams=True) for _ in range(5)]
    for n in (0, 1):
        for _ in range(6):
            request = it.begin(n, streams=True)
            it.pass_s(0.3)
            it.fleet.answered(request, it.now)
            it.end(request, WELL)
    it.pass_s(2)
    it.fleet.health.judge(it.now)
    assert it.state(2) is ReplicaState.EJECTED
    for request in stuck:
        it.end(request, FAULTY)


def test_a_fresh_replica_gets_its_places_bit_by_bit() -> None:
    it = Fleets(3)
    assert it.limit(0) == 36  # all began together, so all are whole
    it.pass_s(20)
    it.fleet.lose(it.name(0), it.now)
    it.report(0, boot="another")
    limits = []
    for _ in range(17):
        limits.append(it.limit(0))
        it.pass_s(0.5)
    assert limits[0] == 3
    assert limits == sorted(limits)
    assert limits[-2] < limits[-1] == 36
    assert it.limit(1) == 36


def test_a_replica_that_joins_later_starts_slowly_and_one_that_was_only_away_does_not() -> None:
    it = Fleets(2)
    it.pass_s(20)
    it.fleet.add(it.name(2), it.now)
    it.report(2)
    assert it.limit(2) == 3
    it.fleet.lose(it.name(0), it.now)
    it.report(0)
    assert it.limit(0) == 36


def test_nobody_starts_slowly_when_no_other_is_whole() -> None:
    it = Fleets(2)
    it.pass_s(20)
    for n in (0, 1):
        it.fleet.lose(it.name(n), it.now)
    it.report(0, boot="another")
    assert it.limit(0) == 36


def test_a_readmitted_replica_starts_slowly() -> None:
    it = Fleets(3)
    it.serve(0, FAULTY, FAULTY, FAULTY)
    it.pass_s(2)
    it.serve(0, WELL)
    assert it.limit(0) == 3
    it.pass_s(8)
    assert it.limit(0) == 36


def test_a_new_boot_owes_nothing() -> None:
    it = Fleets(3)
    it.serve(0, FAULTY, FAULTY, FAULTY)
    it.fleet.lose(it.name(0), it.now)
    it.report(0, boot="another")
    assert it.state(0) is ReplicaState.UP


def test_a_loop_that_was_held_up_takes_no_replica_for_silent() -> None:
    it = Fleets(3)
    late = 30.0  # far past every limit; no report was read meanwhile
    assert it.fleet.silence.silent(late) == []
    assert it.fleet.silence.due == late + 1.0  # a heartbeat: all may have been held up with us
    it.now = late + 0.4
    it.report(0)
    assert it.fleet.silence.silent(late + 0.9) == []
    assert it.fleet.silence.silent(late + 1.0) == [it.name(1), it.name(2)]


def test_a_poll_in_time_looks_once_more_and_only_once() -> None:
    it = Fleets(1)
    assert it.fleet.silence.silent(3.0) == []
    assert it.fleet.silence.silent(3.0 + LOOK_S / 2) == []
    assert it.fleet.silence.silent(3.0 + LOOK_S) == [it.name(0)]


moves = st.tuples(
    st.sampled_from(["serve", "serve", "serve", "lose", "report", "reboot", "drain", "pass"]),
    st.integers(0, 4),
    st.sampled_from([WELL, FAULTY, FAULTY, FAULTY, GONE, BUSY, None]),
)


@given(st.integers(1, 5), st.lists(moves, max_size=80))
def test_half_of_the_fleet_stands_whatever_happens(
    size: int, moves: list[tuple[str, int, Conduct | None]]
) -> None:
    it = Fleets(size)
    boots = count()
    for what, which, conduct in moves:
        n = which % size
        if what == "serve" and it.name(n) in it.fleet.open:
            it.serve(n, conduct)
        elif what == "lose":
            it.fleet.lose(it.name(n), it.now)
        elif what in ("report", "reboot"):
            it.report(n, boot=f"b{next(boots)}" if what == "reboot" else "b", draining=which == 4)
        elif what == "drain":
            it.fleet.drain(it.name(n), on=conduct is WELL, now=it.now)
        elif what == "pass":
            it.pass_s(1.5)
        it.fleet.check()  # the law is checked there
    out = {verdict.standing for verdict in it.fleet.health.news}
    assert out <= set(Standing)
    it.pass_s(100)
    assert all(it.state(n) is not ReplicaState.EJECTED for n in range(size))
    assert all(mine.share == 1 for mine in it.fleet.replicas.values())
