"""One replica's breaker: how long it is out, and what brings it in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.breaker import Breaker, HealthRules

RULES = HealthRules(failures=3, ejection_s=1, ejection_max_s=8)


def test_each_time_out_is_twice_as_long_up_to_the_most() -> None:
    breaker, now, outs = Breaker(), 0.0, []
    for _ in range(6):
        until = breaker.open("failures", now, RULES)
        outs.append(until - now)
        assert not breaker.ripen(until - 0.01)
        assert breaker.ripen(until)
        assert breaker.half_open
        breaker.close(until, RULES)
        now = until + 0.5
    assert outs == [1, 2, 4, 8, 8, 8]


def test_a_failed_trial_is_a_repetition_and_a_long_time_in_forgets() -> None:
    breaker = Breaker()
    breaker.open("slow", 0, RULES)
    assert breaker.ripen(1)
    assert breaker.open("slow", 1, RULES) == 3
    assert breaker.ripen(3)
    breaker.close(3, RULES)
    assert breaker.failures == RULES.failures - 1  # on probation
    assert breaker.open("slow", 11, RULES) == 12


@given(st.lists(st.tuples(st.sampled_from(["open", "ripen", "close"]), st.floats(0, 9))))
def test_it_is_never_out_longer_than_the_most(events: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    for what, wait_s in events:
        now += wait_s
        if what == "open":
            assert now < breaker.open("failures", now, RULES) <= now + RULES.ejection_max_s
        elif what == "ripen":
            breaker.ripen(now)
        elif breaker.half_open:
            breaker.close(now, RULES)
            assert not breaker.out
        breaker.check()


def test_a_thousand_repetitions_do_not_overflow() -> None:
    breaker = Breaker()
    for n in range(2000):
        assert breaker.open("slow", n, RULES) <= n + 8
