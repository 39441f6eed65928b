"""Placement's laws: within every room, nothing twice, nothing for ever; and what it is for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.dispatcher import Arrival, Dispatch, Dispatcher, Order, PlacementRules
from gateway.core.popularity import Expected
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, ReplicaReport, Tier

SETTINGS: dict[str, Any] = {
    "load_factor": 1.25, "load_floor": 8, "vnodes": 16, "service_s": 0.05, "host_load_s": 0.005,
    "disk_load_s": 0.15, "hop_s": 0.002, "per_tenant_max": 100, "ttl_s": 60.0,
    "input_weight": 1.0, "output_weight": 2.0, "warm_wait_s": 0.5, "silence_heartbeats": 1e6,
}  # fmt: skip
RULES = PlacementRules(interval_s=1.0, retry_s=1.0, attempts=3, ahead_max=6, cool_s=5.0)
ADAPTERS = [AdapterId(f"adapter-{n:02d}") for n in range(20)]
SIZE = 100


class Host:
    """A replica that keeps what it is told, in a host memory of so many places (LRU)."""

    def __init__(self, name: str, *, places: int, slots: int = 4, boot: str = "1") -> None:
        self.name = ReplicaId(name)
        self.places, self.slots, self.boot = places, slots, boot
        self.seq = 0
        self.held: dict[AdapterId, Tier] = {}  # least recently wanted first
        self.deaf = False  # it takes orders and does nothing

    def obey(self, order: Order) -> None:
        if self.deaf:
            return
        for adapter in order.adapters:
            tier = self.held.pop(adapter, Tier.HOST)
            self.held[adapter] = Tier.GPU if order.tier is Tier.GPU else tier
        while len(self.held) > self.places:
            del self.held[next(iter(self.held))]

    def report(self, **changes: Any) -> ReplicaReport:
        self.seq += 1
        states = [
            AdapterState(a, "d", self.held.get(a, Tier.DISK), size_bytes=SIZE) for a in ADAPTERS
        ]
        told = ReplicaReport(
            replica=self.name, boot=self.boot, seq=self.seq, base="base", slots=self.slots,
            capacity=8, running=0, waiting=0, pages_total=1, pages_free=1, max_model_len=128,
            heartbeat_s=1.0, adapters=tuple(states), host_max=self.places,
        )  # fmt: skip
        return replace(told, **changes)


class World:
    def __init__(self, *hosts: Host, rules: PlacementRules = RULES) -> None:
        self.core = Dispatcher(**SETTINGS, placement=rules)
        self.hosts = {host.name: host for host in hosts}
        self.now = 0.0
        self.count = 0
        self.orders: list[Order] = []
        for host in hosts:
            self.join(host)

    def join(self, host: Host) -> None:
        self.hosts[host.name] = host
        self.core.replica_added(host.name, self.now)
        self.core.report(host.report(), self.now)

    def step(self, seconds: float = 1.0) -> list[Order]:
        """Time passes; orders are obeyed and reported."""
        self.now += seconds
        given: list[Order] = []
        self.core.poll(self.now)
        while orders := self.core.orders(self.now):
            given += orders
        for order in given:
            self.hosts[order.replica].obey(order)
        for host in self.hosts.values():
            self.core.report(host.report(), self.now)
        self.core.check()
        self.orders += given
        return given

    def ask(self, adapter: AdapterId) -> Dispatch | None:
        self.count += 1
        arrival = Arrival(RequestId(str(self.count)), TenantId("t"), 1.0, adapter, 1, 1)
        return self.core.place(arrival, self.now)

    def arrive(self, adapter: AdapterId) -> None:
        self.count += 1
        arrival = Arrival(RequestId(str(self.count)), TenantId("t"), 1.0, adapter, 1, 1)
        self.core.arrive(arrival, self.now)

    def near(self, adapter: AdapterId) -> set[ReplicaId]:
        return {name for name, host in self.hosts.items() if adapter in host.held}

    def settle(self) -> None:
        for _ in range(12):
            self.step()


def test_every_adapter_is_brought_to_its_first_owner_before_anybody_asks() -> None:
    world = World(*(Host(f"replica-{n}", places=12) for n in range(3)))
    world.settle()
    for adapter in ADAPTERS:
        owners = world.core.owners(adapter)
        assert owners
        assert set(owners) <= world.near(adapter)
        dispatch = world.ask(adapter)
        assert dispatch is not None
        assert not dispatch.placement.choice.cold
        world.core.finish(dispatch.request, None, None, world.now)


def test_a_room_is_filled_by_what_its_own_replica_says_that_an_adapter_takes() -> None:
    core = Dispatcher(**SETTINGS, placement=RULES)
    for name, size in (("a-silent", 0), ("told", SIZE)):
        states = tuple(AdapterState(a, "d", Tier.DISK, size_bytes=size) for a in ADAPTERS)
        said = Host(name, places=20).report(adapters=states, host_bytes=5 * SIZE)
        core.replica_added(said.replica, 0)
        core.report(said, 0)
    core.poll(0)
    while core.orders(0):
        pass
    owned = [adapter for adapter in ADAPTERS if "told" in core.owners(adapter)]
    assert len(owned) == 4  # nine tenths of five


def test_once_settled_a_replica_is_only_told_what_to_keep() -> None:
    world = World(*(Host(f"replica-{n}", places=12) for n in range(3)))
    world.settle()
    before = {name: set(host.held) for name, host in world.hosts.items()}
    told = [order for _ in range(25) for order in world.step()]
    assert {name: set(host.held) for name, host in world.hosts.items()} == before
    assert 0 < len(told) <= 3 * 3  # every keep_s at most


def test_a_hot_adapter_grows_owners_with_its_load_and_cools_down() -> None:
    hosts = [Host(f"replica-{n}", places=8) for n in range(4)]
    world = World(*hosts, rules=replace(RULES, spares=0, half_life_s=2.0))
    world.settle()
    hot = ADAPTERS[0]
    assert len(world.core.owners(hot)) == 1
    for _ in range(14):
        world.arrive(hot)
    world.settle()
    assert len(world.core.owners(hot)) >= 3  # 14 in flight, four to an owner
    assert world.core.in_flight == 14
    for number in range(1, 15):
        world.core.finish(RequestId(str(number)), None, None, world.now)
    world.step()
    assert len(world.core.owners(hot)) >= 3  # not at once
    for _ in range(20):
        world.step()
    assert len(world.core.owners(hot)) == 1


def test_who_joins_gets_its_adapters_before_their_traffic() -> None:
    world = World(*(Host(f"replica-{n}", places=24) for n in range(3)))
    world.settle()
    newcomer = Host("replica-3", places=24)
    newcomer.deaf = True
    world.join(newcomer)
    world.step()
    for adapter in ADAPTERS:  # make before break: nothing goes there yet
        dispatch = world.ask(adapter)
        assert dispatch is not None
        assert dispatch.placement.replica != newcomer.name
        world.core.finish(dispatch.request, None, None, world.now)
    newcomer.deaf = False
    world.settle()
    served = Counter()
    for adapter in ADAPTERS:
        dispatch = world.ask(adapter)
        assert dispatch is not None
        assert not dispatch.placement.choice.cold
        served[dispatch.placement.replica] += 1
    assert served[newcomer.name] > 0


def test_who_leaves_serves_until_others_have_what_it_has() -> None:
    rules = replace(RULES, spares=0)
    world = World(*(Host(f"replica-{n}", places=24) for n in range(3)), rules=rules)
    world.settle()
    mine = [a for a in ADAPTERS if world.core.owners(a) == ("replica-0",)]
    assert mine
    for adapter in mine:
        dispatch = world.ask(adapter)
        assert dispatch is not None
        world.core.finish(dispatch.request, None, None, world.now)
    world.step()
    world.core.leave(ReplicaId("replica-0"), world.now)
    state = {view.replica: view.state for view in world.core.view(world.now)}
    assert state[ReplicaId("replica-0")] == "up"
    world.settle()
    state = {view.replica: view.state for view in world.core.view(world.now)}
    assert state[ReplicaId("replica-0")] == "draining"
    for adapter in mine:
        dispatch = world.ask(adapter)
        assert dispatch is not None
        assert not dispatch.placement.choice.cold


def test_who_leaves_waits_no_longer_than_the_handover() -> None:
    world = World(*(Host(f"replica-{n}", places=24) for n in range(2)))
    world.settle()
    for adapter in ADAPTERS:
        world.ask(adapter)
    for host in world.hosts.values():
        host.deaf = True
    world.hosts[ReplicaId("replica-1")].held.clear()
    world.core.leave(ReplicaId("replica-0"), world.now)
    world.step(RULES.handover_s + 1)
    assert {v.replica: v.state for v in world.core.view(world.now)}[ReplicaId("replica-0")] == (
        "draining"
    )


def test_a_scheduled_adapter_has_owners_before_its_time() -> None:
    world = World(*(Host(f"replica-{n}", places=8) for n in range(4)))
    world.settle()
    later = ADAPTERS[-1]
    world.core.expect([Expected(later, 50.0, world.now + 100, world.now + 200)])
    world.settle()
    assert len(world.core.owners(later)) <= 2
    world.now += 100 - RULES.lead_s
    world.settle()
    assert len(world.core.owners(later)) >= 3


class PlacementMachine(RuleBasedStateMachine):
    @initialize(places=st.lists(st.integers(1, 30), min_size=1, max_size=4))
    def begin(self, places: list[int]) -> None:
        hosts = (Host(f"replica-{n}", places=count) for n, count in enumerate(places))
        self.world = World(*hosts)
        self.in_a_row: Counter[tuple[ReplicaId, AdapterId]] = Counter()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        world = self.world
        world.now += seconds
        world.core.poll(world.now)
        near = {name: set(host.held) for name, host in world.hosts.items()}
        views = {view.replica: view for view in world.core.view(world.now)}
        asked: Counter[ReplicaId] = Counter()
        orders = world.core.orders(world.now)
        for order in orders:
            assert views[order.replica].state == "up"
            for adapter in order.adapters:
                if order.tier is Tier.HOST and adapter not in near[order.replica]:
                    asked[order.replica] += 1
                    self.in_a_row[order.replica, adapter] += 1
            world.hosts[order.replica].obey(order)
        assert all(count <= RULES.ahead_max for count in asked.values())
        for name, host in world.hosts.items():
            world.core.report(host.report(), world.now)
            for adapter in host.held:
                self.in_a_row[name, adapter] = 0

    @rule(adapter=st.sampled_from(ADAPTERS), ends=st.booleans())
    def ask(self, adapter: AdapterId, ends: bool) -> None:
        dispatch = self.world.ask(adapter)
        if dispatch is not None:
            self.world.hosts[dispatch.placement.replica].held.setdefault(adapter, Tier.HOST)
            if ends:
                self.world.core.finish(dispatch.request, None, None, self.world.now)

    @rule(number=st.integers(0, 3), deaf=st.booleans())
    def turn_deaf(self, number: int, deaf: bool) -> None:
        if (host := self.world.hosts.get(ReplicaId(f"replica-{number}"))) is not None:
            host.deaf = deaf

    @rule(number=st.integers(0, 3))
    def restart(self, number: int) -> None:
        name = ReplicaId(f"replica-{number}")
        if (host := self.world.hosts.get(name)) is not None:
            self.world.core.replica_lost(name, self.world.now)
            self.world.hosts[name] = Host(name, places=host.places, boot=host.boot + "1")
            self.world.core.report(self.world.hosts[name].report(), self.world.now)
            self.in_a_row = Counter({k: n for k, n in self.in_a_row.items() if k[0] != name})

    @rule(number=st.integers(0, 3), back=st.booleans())
    def leave(self, number: int, back: bool) -> None:
        name = ReplicaId(f"replica-{number}")
        (self.world.core.resume if back else self.world.core.leave)(name, self.world.now)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.core.check()
            long_ago = RULES.retry_s * 2**RULES.attempts
            if self.world.now < long_ago:  # before that nothing is forgotten
                assert all(n <= RULES.attempts for n in self.in_a_row.values())


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
