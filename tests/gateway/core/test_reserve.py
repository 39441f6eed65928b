"""The last places: for whom, how many, until when, and what they change of nobody's turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.dispatcher import Arrival, Dispatch, Dispatcher
from gateway.core.reserve import FIRST, NONE, Reserve, reserved
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, ReplicaReport, Tier

SETTINGS: dict[str, Any] = {
    "load_factor": 1.25, "load_floor": 64, "vnodes": 8, "service_s": 0.05, "host_load_s": 0.005,
    "disk_load_s": 0.15, "hop_s": 0.002, "per_tenant_max": 1000, "ttl_s": 600.0,
    "input_weight": 1.0, "output_weight": 2.0, "warm_wait_s": 0.05, "silence_heartbeats": 1e9,
    "reserve_share": 0.125, "reserve_for_s": 60.0,
}  # fmt: skip
A, B, C, D, E = (TenantId(name) for name in "abcde")
SQL, LEGAL = AdapterId("sql"), AdapterId("legal")


@dataclass
class House:
    """Replicas of 16 places, of which two are kept."""

    replicas: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    asked: int = 0

    def __post_init__(self) -> None:
        self.core = Dispatcher(**(SETTINGS | self.settings))
        for n in range(self.replicas):
            self.say(n, SQL, LEGAL)
        self.where: dict[RequestId, tuple[TenantId, ReplicaId]] = {}

    def say(self, n: int, *adapters: AdapterId, seq: int = 1, running: int = 0) -> None:
        replica = ReplicaId(f"replica-{n}")
        self.core.replica_added(replica, self.now)
        report = ReplicaReport(
            replica=replica, boot="b", seq=seq, base="base", slots=4, capacity=16, running=running,
            waiting=0, pages_total=1, pages_free=1, max_model_len=4096, heartbeat_s=1e9,
            adapters=tuple(AdapterState(name, "v", Tier.GPU) for name in adapters),
        )  # fmt: skip
        self.core.report(report, self.now)

    def ask(
        self, tenant: TenantId, n: int = 1, *, adapter: AdapterId | None = None, **fields: Any
    ) -> int:
        """How many of the tenant's are sent, of all that wait."""
        for _ in range(n):
            self.asked += 1
            arrival = Arrival(RequestId(str(self.asked)), tenant, 1.0, adapter, 10, 20)
            self.core.arrive(arrival._replace(**fields), self.now)
        return self.poll().count(tenant)

    def poll(self) -> list[TenantId]:
        sent = []
        for decision in self.core.poll(self.now):
            assert isinstance(decision, Dispatch)
            arrival = self.core._in_flight[decision.request].arrival
            self.where[decision.request] = (arrival.tenant, decision.placement.replica)
            sent.append(arrival.tenant)
        self.core.check()
        return sent

    def end(self, tenant: TenantId, *, output: int = 20) -> list[TenantId]:
        """Its oldest ends: who is sent then."""
        request = next(r for r, (whose, _) in self.where.items() if whose == tenant)
        del self.where[request]
        self.core.finish(request, 10, output, self.now)
        return self.poll()

    def running(self, tenant: TenantId) -> int:
        return sum(whose == tenant for whose, _ in self.where.values())


def test_who_has_nothing_running_is_placed_at_once_beside_a_flood() -> None:
    house = House()
    assert house.ask(B) == 1
    assert house.ask(A, 64) == 13  # 16 places, one of them B's, two kept
    assert house.ask(B, 2) == 2
    assert house.end(A) == [], "the reserve fills again first"
    assert house.end(A) == []
    assert house.end(A) == [A]
    assert house.ask(B) == 1


def test_a_tenant_alone_has_every_place() -> None:
    assert House().ask(A, 64) == 18, "16 and two that travel"


def test_the_reserve_is_open_to_all_once_one_tenant_alone_has_asked_for_a_minute() -> None:
    house = House()
    house.ask(B)
    house.ask(A, 64)
    house.end(B)
    assert house.running(A) == 14
    house.now = 59.0
    assert house.ask(A) == 0
    assert house.core.next_wakeup(house.now) == 60.0
    house.now = 60.0
    assert house.poll() == [A] * 4
    assert house.ask(B) == 0
    for _ in range(5):
        house.end(A)
    assert house.ask(B) + house.running(B) >= 1, "next in turn, as ever"
    for _ in range(5):
        house.end(A)
    assert house.ask(B, 2) == 2, "the first flood that ends fills it again"


def test_nothing_is_kept_where_the_share_is_nothing() -> None:
    house = House(settings={"reserve_share": 0.0})
    house.ask(B)
    assert house.ask(A, 64) == 17


def test_two_floods_share_what_is_common_and_leave_the_rest_to_who_holds_little() -> None:
    house = House()
    house.ask(A, 64)
    house.ask(B, 64)
    for _ in range(40):
        house.end(A if house.running(A) > house.running(B) else B)
    assert house.running(A) + house.running(B) == 14
    assert abs(house.running(A) - house.running(B)) <= 1
    assert house.ask(C) == 1
    assert house.ask(D) == 1


def test_four_floods_leave_the_rest_to_who_holds_little_as_soon_as_their_lines_are_long() -> None:
    house = House()
    for tenant in (A, B, C, D):
        house.ask(tenant, 64)
    for _ in range(40):
        house.end(max((A, B, C, D), key=house.running))
    assert sum(house.running(tenant) for tenant in (A, B, C, D)) == 14
    assert house.ask(E, 2) == 2


def test_nothing_is_kept_from_several_whose_lines_are_short() -> None:
    house = House()
    for _ in range(5):
        for tenant in (A, B, C, D):
            house.ask(tenant)
    assert [house.running(tenant) for tenant in (A, B, C, D)] == [5, 5, 4, 4]
    house.ask(A)
    house.ask(B)
    assert house.core.queued == 4, "no more than a quarter of 18"
    assert house.end(A) == [C]
    house.ask(C, 4)
    assert house.end(A) == [], "now many wait"


def test_who_was_kept_from_a_place_has_it_once_few_wait() -> None:
    house = House()
    for _ in range(4):
        for tenant in (A, B, C, D):
            house.ask(tenant)
    house.ask(A, 64)
    assert house.end(A) == []
    late = [RequestId(str(house.asked - n)) for n in range(61)]
    assert house.core.next_wakeup(house.now) != house.now
    for request in late:
        house.core.cancel(request, house.now)
    assert house.core.next_wakeup(house.now) == house.now
    assert house.poll() == [A] * 3


def test_who_holds_half_of_its_share_waits_like_everyone() -> None:
    house = House(settings={"reserve_share": 0.25})
    house.ask(B)
    assert house.ask(A, 64) == 11  # 12 of 16 are anyone's
    assert house.ask(B, 8) == 3, "4 are more than a quarter of 15"
    assert [house.end(A) for _ in range(3)] == [[], [], []]
    assert house.end(A) == [B], "a place that is anyone's is for who is next"


def test_a_greater_weight_may_hold_more_of_the_reserve() -> None:
    def most(weight: float) -> int:
        house = House(settings={"reserve_share": 0.5})
        house.ask(B, weight=weight)
        house.ask(A, 64)
        return house.ask(B, 64, weight=weight)

    assert most(8.0) > most(1.0) > 0


def test_the_reserve_of_the_adapters_own_replica_is_what_counts() -> None:
    """A light tenant's adapter is on one replica, which a flood has filled; another has room."""
    house = House(replicas=0)
    house.say(0, SQL)
    house.say(1, LEGAL)
    house.ask(B, adapter=SQL)
    assert house.ask(A, 64, adapter=SQL) == 13
    assert house.ask(B, adapter=SQL) == 1
    assert house.ask(A, adapter=LEGAL) == 1, "nor does it hold up what goes elsewhere"


def test_a_light_tenant_of_the_same_adapter_is_not_stuck_with_the_flood() -> None:
    house = House(replicas=0)
    house.say(0, SQL)
    house.say(1, LEGAL)
    house.ask(C, adapter=LEGAL)
    house.ask(A, 64, adapter=SQL)
    house.poll()
    assert house.ask(B, adapter=SQL) == 1


def test_nobody_passes_one_who_waits_for_a_common_place_there() -> None:
    """C holds nothing, and yet it has had more than A, whose turn it is."""
    house = House(replicas=0)
    house.say(0, SQL)
    house.say(1, LEGAL)
    for _ in range(20):
        house.ask(C, adapter=LEGAL, output_tokens=500)
        assert house.end(C, output=500) == []
        house.ask(A, adapter=SQL)
    assert house.running(A) == 14
    assert house.ask(C, adapter=LEGAL) == 1
    assert house.ask(C, adapter=SQL) == 0
    assert house.core.queued == 7


def test_a_place_that_another_gateway_gives_up_wakes_who_waits_for_a_common_one() -> None:
    house = House(replicas=0)
    house.say(0, SQL)
    house.say(1, LEGAL)
    house.ask(B, adapter=SQL)
    house.say(0, SQL, seq=2, running=5)
    assert house.ask(A, 64, adapter=SQL) == 9
    house.say(0, SQL, seq=3, running=10)  # what runs is ours alone
    assert house.poll() == [A] * 4


def test_a_flood_at_another_gateway_leaves_the_reserve_to_who_is_light_here() -> None:
    """Here asks one tenant only: what others have in flight elsewhere counts."""
    house = House()
    house.say(0, SQL, LEGAL, seq=2, running=13)
    house.core.served_elsewhere(A, 1e5, 13 * 50.0)
    assert house.ask(B, 3) == 3
    here = House()
    here.ask(A, 4)
    here.core.served_elsewhere(B, 50.0, 50.0)
    assert here.ask(A, 64) == 10, "and a flood here leaves it to who is light elsewhere"


# the books ---------------------------------------------------------------------------------------

events = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from("abc"), st.integers(1, 1000)),
        st.tuples(st.just("end"), st.integers(0, 50), st.none()),
        st.tuples(st.just("elsewhere"), st.sampled_from("abcd"), st.integers(0, 1000)),
    ),
    max_size=60,
)


@given(events, st.sampled_from([0.5, 1.0, 3.0]))
def test_the_sums_are_what_they_sum_and_who_has_nothing_has_a_claim(
    events: list[tuple[str, Any, Any]], weight: float
) -> None:
    reserve = Reserve(for_s=60.0)
    running: list[tuple[TenantId, float]] = []
    reserve.asked(A, 0.0)
    reserve.asked(B, 0.0)
    for what, this, that in events:
        if what == "begin":
            running.append((TenantId(this), float(that)))
            reserve.began(TenantId(this), weight, float(that))
        elif what == "elsewhere":
            reserve.elsewhere(TenantId(this), float(that))
        elif running:
            reserve.ended(*running.pop(this % len(running)))
        reserve.check()
        assert reserve.claim(TenantId("new"), 7.0, 1.0, waiting=99) == 7.0
    assert reserve.claim(A, 7.0, 60.0, waiting=99) == FIRST


def test_the_most_that_is_kept_is_the_share_and_a_place_more() -> None:
    assert [reserved(0.05, n) for n in (1, 4, 7, 8, 16, 20, 32, 64, 256)] == [
        0, 0, 0, 1, 1, 1, 2, 4, 13,
    ]  # fmt: skip
    assert reserved(0.0, 64) == 0


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(1, 1000)), min_size=1),
    st.integers(1, 1000),
    st.integers(0, 20),
)
def test_more_than_half_its_share_is_no_claim_and_while_few_wait_more_than_a_third_of_all(
    others: list[tuple[float, int]], running: int, waiting: int
) -> None:
    reserve = Reserve(for_s=60.0)
    reserve.asked(A, 0.0)
    reserve.asked(B, 0.0)
    for n, (weight, cost) in enumerate(others):
        reserve.began(TenantId(f"other-{n}"), weight, cost)
    reserve.began(B, 3.0, running)
    share = running / (running + sum(cost for _, cost in others))
    most = 3.0 / (3.0 + sum(weight for weight, _ in others)) / 2
    if 4 * waiting <= len(others) + 1:
        most = max(most, 1 / 3)
    if not math.isclose(share, most):
        assert (reserve.claim(B, 5.0, 0.0, waiting=waiting) < NONE) == (share < most)


def test_a_holder_of_more_than_half_its_share_has_no_claim() -> None:
    reserve = Reserve(for_s=60.0)
    reserve.asked(A, 0.0)
    reserve.asked(B, 0.0)
    reserve.began(A, 1.0, 300.0)
    reserve.began(B, 1.0, 100.0)
    assert reserve.claim(B, 5.0, 0.0, waiting=9) == 5.0
    reserve.began(B, 1.0, 1.0)
    assert reserve.claim(B, 5.0, 0.0, waiting=9) == NONE
    assert reserve.claim(A, 5.0, 0.0, waiting=9) == NONE
    reserve.ended(B, 1.0)
    with pytest.raises(KeyError):
        reserve.ended(C, 1.0)
