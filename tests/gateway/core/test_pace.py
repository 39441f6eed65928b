"""Who is slow beside the others, and who is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.breaker import HealthRules
from gateway.core.pace import SAMPLES_MAX, Pace, slow
from shared.ids import ReplicaId, RequestId

RULES = HealthRules(slow_factor=4, slow_s=0.5, slow_samples=4)


def pace(*times: float, waiting: tuple[float, ...] = ()) -> Pace:
    """First tokens that took `times`, and requests that wait since `waiting`; it is 100 now."""
    made = Pace()
    for n, time in enumerate(times):
        made.waiting[RequestId(f"r{n}")] = 0.0
        made.answered(RequestId(f"r{n}"), time)
    made.waiting.update({RequestId(f"w{n}"): at for n, at in enumerate(waiting)})
    return made


def slow_of(*paces: Pace) -> list[int]:
    named = {ReplicaId(str(n)): one for n, one in enumerate(paces)}
    return [int(replica) for replica in slow(named, 100.0, RULES)]


def test_one_that_is_far_above_the_others_is_slow() -> None:
    assert slow_of(pace(*[0.1] * 9), pace(*[0.2] * 9), pace(*[3.0] * 9)) == [2]


def test_one_that_is_only_somewhat_later_is_not() -> None:
    assert slow_of(pace(*[0.01] * 9), pace(*[0.4] * 9)) == []  # 40 times, and 0.39 s
    assert slow_of(pace(*[1.0] * 9), pace(*[3.5] * 9)) == []  # 2.5 s, and 3.5 times


def test_a_few_long_ones_are_nobodys_fault() -> None:
    assert slow_of(pace(*[0.1] * 9), pace(0.1, 0.1, 0.1, 0.1, 0.1, 9, 9, 9, 9)) == []


def test_too_few_samples_tell_nothing_of_either_side() -> None:
    assert slow_of(pace(*[0.1] * 9), pace(9, 9, 9)) == []
    assert slow_of(pace(*[0.1] * 3), pace(*[9] * 9)) == []


def test_a_frozen_one_is_found_by_those_that_wait() -> None:
    assert slow_of(pace(*[0.1] * 9), pace(waiting=(90, 91, 92, 93))) == [1]
    assert slow_of(pace(*[0.1] * 9), pace(waiting=(99.9,) * 9)) == []  # only just sent


def test_a_fleet_that_is_slow_as_a_whole_has_no_slow_replica() -> None:
    assert slow_of(pace(*[9] * 9), pace(*[10] * 9), pace(*[11] * 9)) == []


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(2, 6))
def test_equal_replicas_are_never_slow(times: list[float], count: int) -> None:
    assert slow_of(*[pace(*times) for _ in range(count)]) == []


def test_the_latest_samples_are_kept_and_a_new_window_keeps_who_waits() -> None:
    one = pace(*range(SAMPLES_MAX + 10), waiting=(1.0,))
    assert len(one.times()) == SAMPLES_MAX
    assert min(one.times()) == 10
    one.turn()
    assert one.times() == []
    assert list(one.waiting) == ["w0"]
    one.answered(RequestId("unknown"), 5.0)
    assert one.times() == []
