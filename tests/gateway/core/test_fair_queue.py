"""The fair queue's laws: shares by weight, first in first out, nothing banked, nobody forgotten."""

from __future__ import annotations

from collections import deque
from itertools import count

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.fair_queue import FairQueue
from shared.ids import RequestId, TenantId

LAG = 1e9
costs = st.floats(1, 1000)
weights = st.sampled_from([0.5, 1.0, 2.0, 7.0])
A, B, C = TenantId("a"), TenantId("b"), TenantId("c")


class Driver:
    """A queue, and what each tenant was served so far."""

    def __init__(self, lag_max: float = LAG) -> None:
        self.queue: FairQueue[str] = FairQueue(lag_max=lag_max)
        self.tenant: dict[RequestId, TenantId] = {}
        self.cost: dict[RequestId, float] = {}
        self.ids = (RequestId(f"r{i}") for i in count())

    def push(
        self, tenant: TenantId, cost: float = 10, weight: float = 1, key: str = "k"
    ) -> RequestId:
        request = next(self.ids)
        assert self.queue.push(
            request, tenant=tenant, weight=weight, key=key, cost=cost, waiting_max=10_000
        )
        self.tenant[request], self.cost[request] = tenant, cost
        return request

    def pop(self) -> RequestId:
        head = self.queue.first()
        assert head is not None
        self.queue.pop(head)
        return head

    def turns(self, n: int, *, actual: float | None = None) -> list[TenantId]:
        """Pop n, settle each at once."""
        turns = []
        for _ in range(n):
            head = self.pop()
            self.queue.settle(head, self.cost[head] if actual is None else actual)
            turns.append(self.tenant[head])
        return turns


@given(
    st.lists(st.tuples(weights, st.lists(costs, min_size=1, max_size=30)), min_size=2, max_size=5),
    st.booleans(),
)
def test_two_backlogged_tenants_stay_within_one_largest_item_each(
    tenants: list[tuple[float, list[float]]], settled: bool
) -> None:
    driver = Driver()
    weight = {TenantId(f"t{i}"): w for i, (w, _) in enumerate(tenants)}
    largest = {TenantId(f"t{i}"): max(costs) / w for i, (w, costs) in enumerate(tenants)}
    for i, (w, costs) in enumerate(tenants):
        for cost in costs:
            driver.push(TenantId(f"t{i}"), cost, w)
    served = dict.fromkeys(weight, 0.0)
    while all(driver.queue.waiting(tenant) for tenant in weight):
        head = driver.pop()
        tenant = driver.tenant[head]
        served[tenant] += driver.cost[head] / weight[tenant]
        if settled:
            driver.queue.settle(head, driver.cost[head])
        driver.queue.check()
        for one in weight:
            for other in weight:
                gap = abs(served[one] - served[other])
                assert gap <= max(largest[one], largest[other]) + 1e-6


@given(st.lists(st.tuples(costs, st.floats(0, 2)), min_size=20, max_size=60))
def test_shares_follow_the_actual_costs_not_the_estimates(
    items: list[tuple[float, float]],
) -> None:
    """One tenant's estimates are wrong by random factors, the other's are right."""
    driver = Driver()
    actual: dict[RequestId, float] = {}
    for estimate, factor in items:
        actual[driver.push(A, estimate)] = estimate * factor
        actual[driver.push(B, estimate)] = estimate
    served = {A: 0.0, B: 0.0}
    while driver.queue.waiting(A) and driver.queue.waiting(B):
        head = driver.pop()
        driver.queue.settle(head, actual[head])
        served[driver.tenant[head]] += actual[head]
        assert abs(served[A] - served[B]) <= 2 * max(actual.values()) + 1e-6


def test_a_tenant_is_first_in_first_out_over_all_its_lines() -> None:
    driver = Driver()
    pushed = [driver.push(A, key=key) for key in "xyxzyx"]
    assert [driver.pop() for _ in pushed] == pushed


@given(st.integers(1, 200), st.booleans())
def test_an_idle_tenant_banks_nothing(before: int, one_runs: bool) -> None:
    """Whether it is forgotten, or remembered for a request of its own that still runs."""
    driver = Driver()
    driver.push(B)
    head = driver.pop()
    if not one_runs:
        driver.queue.settle(head, 10)
    for _ in range(before + 10):
        driver.push(A)
    driver.turns(before)
    for _ in range(10):
        driver.push(B)
    turns = driver.turns(10)
    assert 4 <= turns.count(B) <= 6


@given(st.integers(1, 100))
def test_who_joins_does_not_wait_for_the_overestimates_of_others(n: int) -> None:
    """A has n requests in flight that claim 1000 each and will use 10; B comes new and small."""
    driver = Driver()
    for _ in range(n + 50):
        driver.push(A, cost=1000)
    flying = deque(driver.pop() for _ in range(n))
    for _ in range(20):
        driver.push(B, cost=10)
    turns = []
    for _ in range(20):
        driver.queue.settle(flying.popleft(), 10)
        flying.append(head := driver.pop())
        turns.append(driver.tenant[head])
    assert turns[0] == B
    assert turns.count(B) >= 10


def test_a_heavier_tenant_has_the_larger_share() -> None:
    driver = Driver()
    for _ in range(90):
        driver.push(A, weight=2)
        driver.push(B, weight=1)
    turns = driver.turns(90)
    assert 59 <= turns.count(A) <= 61


def test_a_weight_can_change_while_requests_wait() -> None:
    driver = Driver()
    for weight in (1.0, 9.0):
        for _ in range(100):
            driver.push(A, weight=weight)
            driver.push(B)
    assert driver.turns(100).count(A) >= 88


def test_a_parked_line_keeps_its_place_while_others_pass() -> None:
    driver = Driver()
    blocked = [driver.push(A, key="full") for _ in range(2)]
    other = driver.push(A, key="free")
    for _ in range(6):
        driver.push(B)
    driver.queue.park(A, "full")
    assert other in (driver.pop(), driver.pop())
    assert driver.turns(3) == [B, B, B]
    driver.queue.unpark("full")
    assert [driver.pop() for _ in blocked] == blocked  # A is owed its share


def test_unparking_offers_every_tenants_line_of_that_key_only() -> None:
    driver = Driver()
    x = {driver.push(A, key="x"), driver.push(B, key="x")}
    driver.push(C, key="y")
    for tenant, key in ((A, "x"), (B, "x"), (C, "y")):
        driver.queue.park(tenant, key)
    assert driver.queue.first() is None
    driver.queue.unpark("x")
    assert {driver.pop(), driver.pop()} == x
    assert driver.queue.first() is None


def test_what_a_blocked_tenant_is_owed_is_bounded() -> None:
    driver = Driver(lag_max=100)
    for _ in range(200):
        driver.push(A, key="full")
        driver.push(B)
    driver.queue.park(A, "full")
    driver.turns(100)
    driver.queue.unpark("full")
    turns = driver.turns(40)
    assert turns[:9] == [A] * 9  # 100 cost units of 10 each
    assert 13 <= turns[12:].count(A) <= 15  # and then its share


def test_a_tenant_at_its_bound_is_refused_and_others_are_not() -> None:
    queue: FairQueue[str] = FairQueue(lag_max=LAG)

    def push(request: str, tenant: TenantId) -> bool:
        return queue.push(
            RequestId(request), tenant=tenant, weight=1, key="k", cost=1, waiting_max=2
        )

    assert [push("1", A), push("2", A), push("3", A), push("4", B)] == [True, True, False, True]
    queue.remove(RequestId("1"))
    assert push("3", A)


def test_a_request_that_comes_back_is_uncharged_and_first_of_its_tenant() -> None:
    driver = Driver()
    first, second = driver.push(A, cost=1000), driver.push(A)
    driver.push(B)
    assert driver.pop() == first
    driver.queue.requeue(first, "other line")
    driver.queue.check()
    order = [driver.pop() for _ in range(3)]
    assert order.index(first) < order.index(second)


@given(st.lists(weights, min_size=2, max_size=5), st.integers(20, 60))
def test_the_index_of_fairness_is_near_one_for_those_who_wait(
    given_weights: list[float], turns: int
) -> None:
    driver = Driver()
    for n, weight in enumerate(given_weights):
        for _ in range(turns * 20):
            driver.push(TenantId(f"t{n}"), 1, weight)
    assert driver.queue.fairness() == 1  # nobody has waited yet
    driver.turns(turns * 10)
    n, item = len(given_weights), max(1 / weight for weight in given_weights)
    each = turns * 10 / sum(given_weights)  # in virtual units, but for one item
    assert driver.queue.fairness() >= min(1.0, ((each - item) / (each + item)) ** 2) - 1e-9
    assert 1 / n <= driver.queue.fairness() <= 1


def test_the_index_of_fairness_falls_when_one_that_waits_gets_nothing() -> None:
    driver = Driver()
    for _ in range(20):
        driver.push(A, key="a")
        driver.push(B, key="b")
    driver.queue.fairness()
    driver.queue.park(A, "a")
    driver.turns(10)
    assert driver.queue.fairness() == 0.5
    for _ in range(10):
        driver.turns(1)
    assert driver.queue.waiting(B) == 0
    assert driver.queue.fairness() == 1  # of those who waited all the time, one is left


def test_idle_tenants_are_forgotten() -> None:
    """Neither memory nor the cost of a pop grows with tenants that came once."""
    driver = Driver()
    for i in range(5000):
        driver.push(TenantId(f"t{i}"))
        driver.turns(1)
    assert len(driver.queue._tenants) <= 128
    assert not driver.queue._order


class FairQueueMachine(RuleBasedStateMachine):
    """Against a plain model: lists in order of arrival, sets of what is parked."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(lag_max=500)
        self.lines: dict[tuple[TenantId, str], list[RequestId]] = {}
        self.parked: set[tuple[TenantId, str]] = set()
        self.key: dict[RequestId, str] = {}
        self.flying: list[RequestId] = []

    @rule(tenant=st.sampled_from([A, B, C]), key=st.sampled_from("xyz"), cost=costs, w=weights)
    def push(self, tenant: TenantId, key: str, cost: float, w: float) -> None:
        request = self.driver.push(tenant, cost, w, key)
        self.key[request] = key
        self.lines.setdefault((tenant, key), []).append(request)

    @rule()
    def pop(self) -> None:
        ready = [self.lines[line] for line in self.lines.keys() - self.parked if self.lines[line]]
        head = self.driver.queue.first()
        assert (head is None) == (not ready)  # work conserving
        if head is not None:
            self.driver.queue.pop(head)
            line = self.lines[self.driver.tenant[head], self.key[head]]
            assert line.pop(0) == head  # first in, first out
            self.flying.append(head)
            self.forget_empty()

    @rule()
    def park(self) -> None:
        head = self.driver.queue.first()
        if head is not None:
            self.driver.queue.park(self.driver.tenant[head], self.key[head])
            self.parked.add((self.driver.tenant[head], self.key[head]))

    @rule(key=st.sampled_from("xyz"))
    def unpark(self, key: str) -> None:
        self.driver.queue.unpark(key)
        self.parked = {line for line in self.parked if line[1] != key}

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), factor=st.floats(0, 3))
    def settle(self, data: st.DataObject, factor: float) -> None:
        request = data.draw(st.sampled_from(self.flying))
        self.flying.remove(request)
        self.driver.queue.settle(request, factor * self.driver.cost[request])

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), key=st.sampled_from("xyz"))
    def requeue(self, data: st.DataObject, key: str) -> None:
        request = data.draw(st.sampled_from(self.flying))
        self.flying.remove(request)
        self.driver.queue.requeue(request, key)
        self.key[request] = key
        line = self.lines.setdefault((self.driver.tenant[request], key), [])
        line.append(request)
        line.sort(key=lambda r: int(r[1:]))

    @precondition(lambda self: any(self.lines.values()))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        queued = sorted(request for line in self.lines.values() for request in line)
        request = data.draw(st.sampled_from(queued))
        self.driver.queue.remove(request)
        self.lines[self.driver.tenant[request], self.key[request]].remove(request)
        self.forget_empty()

    def forget_empty(self) -> None:
        """A line that empties is gone; the next one of its name is not parked."""
        self.lines = {line: requests for line, requests in self.lines.items() if requests}
        self.parked &= self.lines.keys()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.driver.queue.check()
        assert len(self.driver.queue) == sum(map(len, self.lines.values()))
        for key in self.driver.queue.all_keys():
            here = {r for (_, k), line in self.lines.items() if k == key for r in line}
            assert set(self.driver.queue.of_key(key)) == here


TestFairQueueMachine = FairQueueMachine.TestCase
