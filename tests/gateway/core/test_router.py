"""The router's laws: under the bound, only where it may, home when nothing speaks against it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.fleet import Conduct, Fleet
from gateway.core.pool import Pool
from gateway.core.reserve import NONE
from gateway.core.residency import ResidencyMap
from gateway.core.ring import AdapterRing
from gateway.core.router import Choice, Kind, Router
from gateway.core.scales import Scales
from gateway.core.terms import WHILE_FULL
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

SQL = AdapterId("sql")
HOST_S, DISK_S, HOP_S, SERVICE_S = 0.005, 0.15, 0.002, 0.05
WARM_WAIT_S = 0.5
NOBODY: frozenset[ReplicaId] = frozenset()


@dataclass
class World:
    """A ring, a map and a fleet that hear the same reports, and a router over them."""

    load_factor: float = 1.25
    load_floor: int = 8
    residency: ResidencyMap = field(default_factory=ResidencyMap)
    reserve_share: float = 0.0
    begun: int = 0
    seq: int = 0

    def __post_init__(self) -> None:
        self.fleet = Fleet(
            service_s=SERVICE_S, silence_heartbeats=3, vnodes=16, reserve_share=self.reserve_share
        )
        self.router = Router(
            residency=self.residency, fleet=self.fleet,
            scales=Scales(
                residency=self.residency, load_factor=self.load_factor,
                load_floor=self.load_floor, load_floor_share=0.0,
                host_load_s=HOST_S, disk_load_s=DISK_S, hop_s=HOP_S, warm_wait_s=WARM_WAIT_S,
            ),
        )  # fmt: skip

    def add(
        self,
        i: int,
        tier: Tier | None = Tier.DISK,
        *,
        load: int = 0,
        capacity: int = 64,
        slots: int = 4,
        status: AdapterStatus = AdapterStatus.READY,
        others: tuple[AdapterState, ...] = (),
        now: float = 0,
    ) -> ReplicaId:
        """Replica i as it reports itself; `load` requests of others run on it."""
        replica = ReplicaId(f"replica-{i}")
        self.seq += 1
        mine = () if tier is None else (AdapterState(SQL, f"digest-{i}", tier, status),)
        report = ReplicaReport(
            replica=replica, boot="b", seq=self.seq, base="base", slots=slots, capacity=capacity,
            running=min(load, capacity), waiting=max(0, load - capacity), pages_total=1,
            pages_free=1, max_model_len=128, heartbeat_s=1, adapters=(*mine, *others),
        )  # fmt: skip
        self.fleet.add(replica, now)
        self.residency.apply(report, now)
        self.fleet.report(report, now)
        return replica

    @property
    def pool(self) -> Pool:
        """The only one, or that of the first replica."""
        pool = self.fleet.pools.of(next(iter(self.fleet.replicas)))
        assert pool is not None
        return pool

    @property
    def ring(self) -> AdapterRing:
        return self.pool.ring

    def begin(self, replica: ReplicaId, adapter: AdapterId | None, now: float = 0) -> None:
        self.begun += 1
        self.fleet.begin(RequestId(f"r{self.begun}"), replica, adapter, now)

    def suspect(self, replica: ReplicaId) -> None:
        """A connection to it fails."""
        if self.fleet.replicas[replica].open:
            self.begin(replica, None)
            self.fleet.finish(RequestId(f"r{self.begun}"), 0, Conduct.GONE)

    def pick(
        self, adapter: AdapterId | None = SQL, tried: frozenset[ReplicaId] = NOBODY, now: float = 0
    ) -> Choice:
        choice = self.router.pick(adapter, tried, now)
        assert choice is not None
        return choice

    def homeward(self) -> list[int]:
        """Indices of replicas 0..5 in the ring order of the adapter."""
        return [int(r[-1]) for r in self.ring.order(SQL)]


def uniform(n: int = 6, tier: Tier | None = Tier.DISK) -> World:
    world = World()
    for i in range(n):
        world.add(i, tier)
    return world


replicas = st.lists(
    st.tuples(
        st.sampled_from([None, *Tier]),
        st.integers(0, 40),  # load
        st.sampled_from([1, 4, 16, 32]),  # capacity
        st.sampled_from(["up", "up", "up", "draining", "lost", "suspect", "tried"]),
    ),
    min_size=1,
    max_size=8,
)


@given(replicas, st.sampled_from([1.0, 1.25, 2.0]), st.integers(1, 16), st.booleans())
def test_a_choice_is_allowed_under_its_bound_and_exists_whenever_there_is_room(
    replicas: list[tuple[Tier | None, int, int, str]], factor: float, floor: int, base: bool
) -> None:
    world = World(load_factor=factor, load_floor=floor)
    tried, room, spare = set(), {}, [0, 0]
    for i, (tier, load, capacity, state) in enumerate(replicas):
        replica = world.add(i, tier, load=load, capacity=capacity)
        if state == "tried":
            tried.add(replica)
        elif state == "draining":
            world.fleet.drain(replica, on=True, now=0)
        elif state == "lost":
            world.fleet.lose(replica, 0)
            world.residency.lose(replica)
        elif state == "suspect":
            world.suspect(replica)
        limit = capacity + max(1, capacity // 8)
        if state in ("up", "tried") and load < limit:
            spare[0] += load
            spare[1] += capacity
        if state == "up" and load < limit and (base or tier is not None):
            room[replica] = (load, capacity)
    adapter = None if base else SQL
    choice = world.router.pick(adapter, frozenset(tried), 0)
    assert (choice is None) == (not room)
    if choice is not None:
        load, capacity = room[choice.replica]
        theirs = (1 + sum(load for load, _ in room.values())) / sum(c for _, c in room.values())
        mean = max((1 + spare[0]) / spare[1], theirs)  # the pool's, or theirs if all are above it
        assert load + 1 <= max(math.ceil(factor * mean * capacity), floor)
        chosen = next(terms for terms in choice.terms if terms.replica == choice.replica)
        assert not chosen.refused
        explained = {t.replica: t for t in world.router.explain(adapter, 0)}
        assert explained.keys() == world.fleet.replicas.keys()
        for terms in choice.terms:
            better = terms.expected_s < chosen.expected_s
            assert not better or terms.refused, "a better candidate was passed over"
        if not base and not tried:  # the search may stop early, but not too early
            free = [t.expected_s for t in explained.values() if not t.refused]
            assert chosen.expected_s == min(free)


@given(st.lists(st.integers(0, 7), min_size=6, max_size=6), st.sampled_from(list(Tier)))
def test_home_is_taken_whenever_it_is_under_its_bound_and_no_other_is_nearer(
    loads: list[int], tier: Tier
) -> None:
    world = World()
    for i, load in enumerate(loads):
        world.add(i, tier, load=load)
    assert world.pick().replica == world.ring.order(SQL)[0]
    assert world.pick().kind is (Kind.COLD if tier is Tier.DISK else Kind.HOME)


def test_an_idle_fleet_does_not_splinter_an_adapter() -> None:
    world = uniform()
    for _ in range(8):  # the floor
        world.begin(world.pick().replica, SQL)
    assert [world.fleet.replicas[r].in_flight for r in world.ring.order(SQL)] == [8, 0, 0, 0, 0, 0]


def test_a_hot_adapter_spills_to_the_next_on_the_ring_and_stays_under_the_bound() -> None:
    world = uniform()
    for n in range(1, 200):
        world.begin(world.pick().replica, SQL)
        bound = max(8, math.ceil(1.25 * n / 6))
        assert max(r.load for r in world.fleet.replicas.values()) <= bound
    first, second = world.ring.order(SQL)[:2]
    assert world.fleet.replicas[first].load >= world.fleet.replicas[second].load > 8


def test_a_warm_replica_is_preferred_to_a_cold_home() -> None:
    world = uniform()
    far = world.homeward()[5]
    world.add(far, Tier.HOST)
    assert (world.pick().replica, world.pick().kind) == (f"replica-{far}", Kind.WARM)


def test_hops_decide_between_equals_and_a_resident_home_ends_the_search() -> None:
    world = uniform(tier=Tier.GPU)
    choice = world.pick()
    assert choice.kind is Kind.HOME
    assert choice.replica == world.ring.order(SQL)[0]
    assert len(choice.terms) == 1


def test_a_spill_is_from_disk_because_home_could_not_take_it() -> None:
    world = uniform()
    home, second = world.homeward()[:2]
    world.add(home, Tier.GPU, load=40)
    assert (world.pick().replica, world.pick().kind) == (f"replica-{second}", Kind.SPILL)
    assert world.pick().awaited == {f"replica-{home}"}


def test_a_second_copy_is_not_begun_for_a_wait_shorter_than_that_in_the_line() -> None:
    world = World()
    running = tuple(AdapterState(AdapterId(f"a{n}"), "d", Tier.GPU, running=1) for n in range(6))
    for i in range(6):
        world.add(i, load=15, capacity=16)
    home = world.homeward()[0]
    world.add(home, Tier.HOST, load=17, capacity=16, slots=1, others=running)
    terms = world.router.explain(SQL, 0)
    assert terms[0].queue_s + terms[0].slot_s > DISK_S  # it would be faster elsewhere, this once
    assert (world.pick().replica, world.pick().kind) == (f"replica-{home}", Kind.HOME)


def test_a_near_replica_that_is_full_is_waited_for_longer_than_one_at_its_bound() -> None:
    world = uniform()
    home = world.homeward()[0]
    world.add(home, Tier.GPU, load=40)
    assert world.pick().patience == 1
    world.add(home, Tier.GPU, load=80)
    assert world.pick().awaited == {f"replica-{home}"}
    assert world.pick().patience == WHILE_FULL


def test_a_replica_that_keeps_its_last_places_is_waited_for_as_a_full_one() -> None:
    world = World(load_floor=64, reserve_share=0.25)
    for i in range(6):
        world.add(i)
    home = world.homeward()[0]
    world.add(home, Tier.GPU, load=48)
    choice = world.router.pick(SQL, NOBODY, 0, claim=NONE)
    assert choice is not None
    assert choice.cold
    assert choice.awaited == {f"replica-{home}"}
    assert choice.patience == WHILE_FULL
    assert world.pick().replica == f"replica-{home}", "who has a claim goes there"


def test_a_request_that_home_failed_is_a_spill_or_warm_elsewhere() -> None:
    world = uniform()
    home, second, third = world.homeward()[:3]
    tried = frozenset({ReplicaId(f"replica-{home}")})
    assert world.pick(tried=tried).kind is Kind.SPILL
    assert world.pick(tried=tried).replica == f"replica-{second}"
    world.add(third, Tier.GPU)
    assert (world.pick(tried=tried).replica, world.pick(tried=tried).kind) == (
        f"replica-{third}",
        Kind.WARM,
    )


def test_a_load_under_way_costs_what_is_left_of_it() -> None:
    world = uniform()
    home, second = world.homeward()[:2]
    world.add(second, Tier.DISK, status=AdapterStatus.LOADING, now=10.0)
    choice = world.pick(now=10.1)
    assert choice.replica == f"replica-{second}"
    assert not choice.cold
    terms = {t.replica: t for t in choice.terms}
    assert terms[ReplicaId(f"replica-{second}")].load_s == pytest.approx(0.05)
    assert terms[ReplicaId(f"replica-{home}")].load_s == DISK_S


def test_a_load_begun_for_a_request_of_ours_counts_before_any_report() -> None:
    world = uniform()
    second = ReplicaId(f"replica-{world.homeward()[1]}")
    world.begin(second, SQL, now=5.0)
    assert world.pick(now=5.1).replica == second


def test_slots_held_by_running_and_pinned_adapters_are_a_cost() -> None:
    running = AdapterState(AdapterId("a"), "d", Tier.GPU, running=2)
    pinned = AdapterState(AdapterId("b"), "d", Tier.GPU, pinned=True)
    idle = AdapterState(AdapterId("c"), "d", Tier.GPU)
    world = uniform(tier=Tier.HOST)
    home, second = world.homeward()[:2]
    world.add(home, Tier.HOST, slots=3, others=(running, pinned, idle))
    assert world.pick().replica == f"replica-{home}"  # an idle adapter can leave
    world.begin(ReplicaId(f"replica-{home}"), AdapterId("c"))
    choice = world.pick()
    assert choice.replica == f"replica-{second}"
    assert choice.terms[0].slot_s == SERVICE_S


def test_a_full_replica_is_left_alone_and_the_overlap_is_charged() -> None:
    world = World(load_floor=100)
    world.add(0, Tier.GPU, load=16, capacity=16)
    assert world.pick().terms[0].queue_s == SERVICE_S
    world.begin(ReplicaId("replica-0"), SQL)
    assert world.pick().terms[0].queue_s == 2 * SERVICE_S
    world.begin(ReplicaId("replica-0"), SQL)
    assert world.router.pick(SQL, NOBODY, 0) is None


def test_a_full_replica_does_not_lift_the_bound_of_the_others() -> None:
    world = World(load_factor=1.0, load_floor=1)
    for i in range(3):
        world.add(i, Tier.GPU, capacity=16)
    home, second, third = world.homeward()
    world.add(home, Tier.GPU, capacity=16, load=10)
    world.add(third, Tier.GPU, capacity=32, load=40)
    assert world.pick().terms[0].bound == 6
    assert world.pick().replica == f"replica-{second}"


def test_a_load_from_disk_elsewhere_is_cold_when_home_could_have_taken_it() -> None:
    running = AdapterState(AdapterId("a"), "d", Tier.GPU, running=2)
    world = uniform()
    home, second = world.homeward()[:2]
    world.add(home, Tier.DISK, slots=1, others=(running,))
    assert (world.pick().replica, world.pick().kind) == (f"replica-{second}", Kind.COLD)


def test_an_adapter_that_few_replicas_serve_may_use_all_their_room() -> None:
    world = uniform(tier=None)
    world.add(3, Tier.GPU, capacity=64)
    for _ in range(64):
        assert world.pick().replica == "replica-3"
        world.begin(ReplicaId("replica-3"), SQL)


def test_the_bound_follows_capacity() -> None:
    world = World(load_floor=1)
    for i, capacity in enumerate((8, 64)):
        world.add(i, Tier.GPU, capacity=capacity)
    for _ in range(36):
        world.begin(world.pick().replica, SQL)
    small, large = (world.fleet.replicas[ReplicaId(f"replica-{i}")] for i in (0, 1))
    assert small.load <= math.ceil(1.25 * 36 * 8 / 72)
    assert large.load >= 30


def test_base_requests_go_where_the_load_is_least_for_the_capacity() -> None:
    world = World()
    for i, (load, capacity) in enumerate(((4, 8), (10, 64), (12, 64))):
        world.add(i, None, load=load, capacity=capacity)
    choice = world.pick(None)
    assert (choice.replica, choice.kind, choice.digest) == ("replica-1", Kind.HOME, "")
    assert world.pick(None, frozenset({ReplicaId("replica-1")})).replica == "replica-2"


def test_a_placement_names_the_version_on_that_replica() -> None:
    world = uniform(tier=Tier.GPU)
    assert world.pick().digest == f"digest-{world.homeward()[0]}"


def test_explain_says_of_every_replica_why_not() -> None:
    world = uniform(tier=Tier.GPU)
    order = [ReplicaId(f"replica-{i}") for i in world.homeward()]
    world.add(int(order[1][-1]), Tier.GPU, load=72)
    world.add(int(order[2][-1]), Tier.GPU, load=60)
    world.fleet.drain(order[3], on=True, now=0)
    world.fleet.lose(order[4], 0)
    world.add(int(order[5][-1]), None)
    refused = {t.replica: t.refused for t in world.router.explain(SQL, 0)}
    assert [refused[r] for r in order] == ["", "full", "bound", "draining", "lost", "absent"]
    assert {t.refused for t in world.router.explain(None, 0)} == {
        "",
        "full",
        "bound",
        "draining",
        "lost",
    }


def test_explain_counts_nothing() -> None:
    world = uniform()
    before = [(r.id, r.load) for r in world.fleet.replicas.values()]
    world.router.explain(SQL, 0)
    assert [(r.id, r.load) for r in world.fleet.replicas.values()] == before
