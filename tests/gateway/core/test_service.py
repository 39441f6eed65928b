"""Fair shares over several gateways: totals survive loss, and unequal tenants come out equal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fair_queue import FairQueue
from gateway.core.service import Account, Elsewhere, Service
from shared.ids import RequestId, TenantId

A, B = TenantId("a"), TenantId("b")
LAG_MAX = 65_536.0


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=30))
def test_messages_that_are_lost_cost_freshness_and_not_truth(
    steps: list[tuple[int, bool]],
) -> None:
    """What was heard in all is what was served, less what has been served since the last one."""
    account, elsewhere, told, heard = Account(), Elsewhere(), 0.0, 0.0
    account.tell({A: 100.0}, {A: 1.0})  # long before
    elsewhere.heard({"g": account.tell({A: 7.0}, {A: 1.0})})  # a beginning, not service
    pending = 0.0
    for cost, arrives in steps:
        said = account.tell({A: float(cost)}, {A: 1.0})
        pending += cost
        if arrives:
            heard += elsewhere.heard({"g": said})[A].served
            told, pending = told + pending, 0.0
        assert heard == told


def test_a_gateway_that_begins_anew_or_goes_away_takes_nothing_back() -> None:
    elsewhere = Elsewhere()
    assert elsewhere.heard({"g": {A: Service(50, 5)}})[A] == (0, 5)
    assert elsewhere.heard({"g": {A: Service(60, 3)}})[A] == (10, 3)
    assert elsewhere.heard({"g": {A: Service(4, 1)}})[A] == (4, 1)  # it was restarted
    assert elsewhere.heard({})[A] == (0, 0)  # silent: nothing runs there any more
    assert elsewhere.heard({}) == {}
    assert elsewhere.heard({"g": {A: Service(90, 2)}})[A] == (0, 2)  # a beginning again


@given(st.sets(st.integers(0, 500), max_size=300))
def test_only_who_was_served_of_late_is_told_of(tenants: set[int]) -> None:
    account = Account()
    names = {TenantId(str(n)): 1.0 for n in tenants}
    assert account.tell(names, {}).keys() == names.keys()
    assert account.tell({}, {}) == {}


class Gateway:
    """A queue, its backlog never empty for the tenants it has, and `slots` places."""

    def __init__(self, name: str, tenants: dict[TenantId, float], slots: int) -> None:
        self.name, self._tenants, self._slots = name, tenants, slots
        self.queue: FairQueue[int] = FairQueue(lag_max=LAG_MAX)
        self.account, self.elsewhere = Account(), Elsewhere()
        self.served = dict.fromkeys(tenants, 0.0)
        self._running: list[tuple[RequestId, TenantId, float]] = []
        self._count = 0

    def turn(self, costs: dict[TenantId, float]) -> None:
        """All places are filled anew; what ran has ended, at twice its estimate or half."""
        for request, tenant, actual in self._running:
            self.queue.settle(request, actual)
            self.served[tenant] += actual
        self._running = []
        for tenant, weight in self._tenants.items():
            while self.queue.waiting(tenant) < self._slots:
                self._count += 1
                name = RequestId(f"{self.name}/{tenant}/{self._count}")
                self.queue.push(
                    name, tenant=tenant, weight=weight, key=0, cost=costs[tenant], waiting_max=99
                )
        for _ in range(self._slots):
            request = self.queue.first()
            assert request is not None
            self.queue.pop(request)
            tenant = TenantId(request.split("/")[1])
            actual = costs[tenant] * (2 if self._count % 2 else 0.5)
            self._running.append((request, tenant, actual))
        self.queue.check()


def exchanged(gateways: list[Gateway]) -> None:
    said = {g.name: g.account.tell(g.queue.take_served(), g.queue.running()) for g in gateways}
    for one in gateways:
        others = {name: told for name, told in said.items() if name != one.name}
        for tenant, (served, running) in one.elsewhere.heard(others).items():
            one.queue.served_elsewhere(tenant, served, running)


@given(
    slots=st.tuples(st.integers(2, 8), st.integers(1, 8)),
    costs=st.tuples(st.floats(10, 2000), st.floats(10, 2000)),
    weights=st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([1.0, 2.0, 3.0])),
    every=st.integers(1, 5),
)
def test_a_tenant_at_two_gateways_gets_no_more_than_one_at_one(
    slots: tuple[int, int],
    costs: tuple[float, float],
    weights: tuple[float, float],
    every: int,
) -> None:
    """`a` asks at both gateways and `b` at the first alone. Where the first one has places enough
    to make them equal, they are; else all of its places are `b`'s."""
    first = Gateway("1", {A: weights[0], B: weights[1]}, slots[0])
    second = Gateway("2", {A: weights[0]}, slots[1])
    both, cost = [first, second], {A: costs[0], B: costs[1]}
    shares: list[float] = []
    for turn in range(120):
        for one in both:
            one.turn(cost)
        if turn % every == 0:
            exchanged(both)
        had_a = (first.served[A] + second.served[A]) / weights[0]
        had_b = first.served[B] / weights[1]
        shares.append(had_a - had_b)
    # one exchange's service, and what is in flight, twice over
    slack = 4 * (every + 1) * sum(slots) * max(costs[0] / weights[0], costs[1] / weights[1])
    if had_a > had_b + slack:  # the first one's places were all b's, but for a bounded debt
        assert first.served[A] <= LAG_MAX * weights[0] + 2 * slack * weights[0]
    else:
        assert abs(had_a - had_b) <= slack
    without = Gateway("3", {A: weights[0], B: weights[1]}, slots[0])
    for _ in range(120):
        without.turn(cost)
    assert first.served[B] >= without.served[B] - slack * weights[1]
