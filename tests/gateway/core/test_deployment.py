"""The reconciler's decisions: bounded in number and time, and true to the list alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.deployment import UNLISTED, Deployment, Step

names = st.sampled_from("abcd")


@given(st.lists(st.tuples(st.sets(names), st.sets(names), st.floats(0, 9), st.booleans())))
def test_calls_are_bounded_and_one_a_name(
    looks: list[tuple[set[str], set[str], float, bool]],
) -> None:
    deployment, now = Deployment(parallel=2, attempts=3), 0.0
    under_way: list[Step] = []
    for wanted, held, pause, ends in looks:
        now += pause
        leaving = held - wanted
        begun = deployment.due(sorted(wanted), sorted(leaving), held, now)
        assert all((step.name in held) != step.load for step in begun)
        under_way += begun
        assert len(under_way) <= 2
        assert len({step.name for step in under_way}) == len(under_way)
        if ends and under_way:
            deployment.ended(under_way.pop(), "", now)


def test_a_refused_load_waits_twice_as_long_each_time_and_then_for_a_new_life() -> None:
    deployment, now, at = Deployment(attempts=4, first_s=1, most_s=3), 0.0, []
    while now < 60:
        for step in deployment.due(["a"], [], (), now):
            at.append(now)
            deployment.ended(step, "too large", now)
        now += 0.5
    assert at == [0, 1, 3, 6]
    assert deployment.refused() == {"a": "too large"}
    deployment.restarted()
    assert deployment.due(["a"], [], (), now) == [Step("a", load=True)]


def test_a_success_that_the_list_does_not_show_is_none() -> None:
    deployment = Deployment()
    (step,) = deployment.due(["a"], [], (), 0)
    deployment.ended(step, "", 0)
    assert deployment.due(["a"], [], (), 0.5) == []
    assert deployment.refused() == {"a": UNLISTED}
    assert deployment.due(["a"], [], ("a",), 1) == []
    assert deployment.refused() == {}
