"""Copies in host memory: within the budget, and the cheapest to lose goes first."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replica.core.host_tier import HostTier, Version
from shared.ids import AdapterId

SIZES = st.integers(1, 40)


def version(name: str, digest: str = "") -> Version:
    return AdapterId(name), digest or f"{name}'s"


def twin(name: str, size: int) -> tuple[Version, int]:
    """`e` and `f` are two names of one content."""
    return (version(name, "same"), 10) if name in "ef" else (version(name), size)


def total(copies: dict[Version, int]) -> int:
    return sum({digest: size for (_, digest), size in copies.items()}.values())


class Tier(RuleBasedStateMachine):
    """Against a plain set of what must be there."""

    @initialize(max_bytes=st.integers(40, 120), places=st.none() | st.integers(2, 5))
    def begin(self, max_bytes: int, places: int | None) -> None:
        self.tier = HostTier(max_bytes=max_bytes, places=places)
        self.there: dict[Version, int] = {}
        self.coming: dict[Version, int] = {}

    @rule(name=st.sampled_from("abcdef"), size=SIZES)
    def reserve(self, name: str, size: int) -> None:
        new, size = twin(name, size)
        if not self.tier.has_room(new, size):
            crowded = len(self.coming) == self.tier.places
            assert crowded or total(self.coming | {new: size}) > (self.tier.max_bytes or 0)
            return
        self.let_go(self.tier.reserve(new, size))
        size = self.there.pop(new, self.coming.get(new, size))
        self.coming[new] = size

    @rule(name=st.sampled_from("abcdef"), size=SIZES, reload_s=st.floats(0, 9))
    def arrive(self, name: str, size: int, reload_s: float) -> None:
        new, size = twin(name, size)
        gone = self.tier.arrive(new, size, reload_s)
        self.let_go([item for item in gone if item != new])
        if new in gone:
            assert new not in self.tier
        elif new not in self.coming:
            self.there.setdefault(new, size)

    @rule(name=st.sampled_from("abcdef"), well=st.booleans())
    def end(self, name: str, well: bool) -> None:
        ending, _ = twin(name, 0)
        if ending in self.coming:
            size = self.coming.pop(ending)
            if well:
                self.tier.settle(ending)
                self.there[ending] = size
            else:
                self.tier.drop(ending)

    @rule(name=st.sampled_from("abcdef"))
    def touch(self, name: str) -> None:
        self.tier.touch(twin(name, 0)[0])

    def let_go(self, gone: list[Version]) -> None:
        for item in gone:
            assert item not in self.coming, "a busy copy was let go"
            del self.there[item]

    @invariant()
    def it_holds_what_it_says(self) -> None:
        if hasattr(self, "tier"):
            self.tier.check()
            assert set(self.tier.versions()) == {*self.there, *self.coming}
            assert self.tier.used_bytes == total(self.there | self.coming)


TestTier = Tier.TestCase


def test_two_names_with_one_content_count_once_and_the_bytes_stay_until_both_leave() -> None:
    tier = HostTier(max_bytes=30)
    for name in ("one", "other"):
        tier.arrive(version(name, "same"), 20, reload_s=1)
    assert tier.used_bytes == 20
    assert tier.drop(version("one", "same")) == [version("one", "same")]
    assert tier.used_bytes == 20
    assert tier.arrive(version("new", "v2"), 25) == [version("other", "same")]
    assert tier.used_bytes == 25
    tier.check()


def test_with_equal_costs_the_least_recently_used_goes_first() -> None:
    tier = HostTier(max_bytes=30)
    for name in "abc":
        tier.arrive(version(name), 10, reload_s=1)
    tier.touch(version("a"))
    assert tier.arrive(version("d"), 20, reload_s=2) == [version("b"), version("c")]


def test_a_copy_that_is_dear_to_bring_again_outlives_a_cheap_one() -> None:
    tier = HostTier(max_bytes=30)
    tier.arrive(version("far"), 10, reload_s=5)
    tier.arrive(version("near"), 10, reload_s=0.1)
    tier.arrive(version("nearer"), 10, reload_s=0.05)
    assert tier.arrive(version("new"), 10, reload_s=0.1) == [version("nearer")]
    assert version("far") in tier


def test_a_use_does_not_forget_what_a_copy_cost() -> None:
    tier = HostTier(max_bytes=30)
    for name, reload_s in (("far", 5), ("near", 0.1), ("nearer", 0.1)):
        tier.arrive(version(name), 10, reload_s)
    tier.arrive(version("far"), 10)
    for name in ("near", "nearer"):
        tier.touch(version(name))
    assert tier.arrive(version("new"), 10, reload_s=0.1) == [version("near")]


def test_what_nobody_uses_goes_in_the_end_however_dear() -> None:
    tier = HostTier(max_bytes=30)
    tier.arrive(version("far"), 10, reload_s=5)
    for step in range(200):
        tier.arrive(version(f"near{step}"), 10, reload_s=0.1)
    assert version("far") not in tier


def test_of_equally_dear_copies_the_larger_goes_first() -> None:
    tier = HostTier(max_bytes=100)
    tier.arrive(version("small"), 10, reload_s=1)
    tier.arrive(version("large"), 80, reload_s=1)
    assert tier.arrive(version("new"), 50, reload_s=1) == [version("large")]


def test_a_copy_that_can_never_fit_is_let_go_at_once() -> None:
    tier = HostTier(max_bytes=30)
    tier.arrive(version("a"), 10)
    assert tier.arrive(version("giant"), 31) == [version("giant")]
    assert version("a") in tier
