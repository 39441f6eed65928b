"""The map's law: however reports are repeated or reordered, it ends in the newest one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.residency import Change, ResidencyMap
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

R0, R1 = ReplicaId("replica-0"), ReplicaId("replica-1")
SQL, LEGAL = AdapterId("sql"), AdapterId("legal")


def state(
    adapter: AdapterId,
    tier: Tier = Tier.GPU,
    status: AdapterStatus = AdapterStatus.READY,
    digest: str = "d1",
) -> AdapterState:
    return AdapterState(adapter=adapter, digest=digest, tier=tier, status=status)


def report(
    replica: ReplicaId, seq: int, *adapters: AdapterState, boot: str = "boot-0"
) -> ReplicaReport:
    return ReplicaReport(
        replica=replica, boot=boot, seq=seq, base="base", slots=4, capacity=8, running=0,
        waiting=0, pages_total=10, pages_free=10, max_model_len=128, heartbeat_s=1.0,
        adapters=adapters,
    )  # fmt: skip


def test_a_repeated_or_older_report_changes_nothing() -> None:
    residency = ResidencyMap()
    assert residency.apply(report(R0, 5, state(SQL)), 0) == Change(gained=frozenset({SQL}))
    assert residency.apply(report(R0, 5), 0) is None
    assert residency.apply(report(R0, 4), 0) is None
    assert residency.holders(SQL)[R0].tier is Tier.GPU


def test_a_new_boot_replaces_all_and_the_old_one_never_speaks_again() -> None:
    residency = ResidencyMap()
    residency.apply(report(R0, 90, state(SQL)), 0)
    change = residency.apply(report(R0, 0, state(LEGAL), boot="boot-1"), 0)
    assert change == Change(gained=frozenset({LEGAL}), gone=frozenset({SQL}))
    assert residency.apply(report(R0, 91, state(SQL)), 0) is None
    assert residency.adapters() == {LEGAL: "d1"}


def test_a_lost_replica_holds_nothing_but_its_names_are_known() -> None:
    residency = ResidencyMap()
    residency.apply(report(R0, 1, state(SQL)), 0)
    assert residency.lose(R0) == Change(gone=frozenset({SQL}))
    assert not residency.holders(SQL)
    assert residency.of(R0) == ()
    assert residency.knows(SQL)
    assert residency.apply(report(R0, 1, state(SQL)), 0) is None  # an echo revives nobody
    assert residency.apply(report(R0, 2, state(LEGAL)), 0) == Change(gained=frozenset({LEGAL}))
    assert not residency.knows(SQL)


def test_a_removed_replica_leaves_no_name() -> None:
    residency = ResidencyMap()
    residency.apply(report(R0, 1, state(SQL)), 0)
    residency.forget(R0)
    assert not residency.knows(SQL)
    residency.check()


def test_a_failed_adapter_is_shown_but_not_routable() -> None:
    residency = ResidencyMap()
    residency.apply(report(R0, 1, state(SQL, status=AdapterStatus.FAILED)), 0)
    assert not residency.knows(SQL)
    assert [s.adapter for s in residency.of(R0)] == [SQL]


def test_a_load_is_timed_from_its_first_report() -> None:
    residency = ResidencyMap()
    for seq, now in ((1, 10.0), (2, 11.0)):
        residency.apply(report(R0, seq, state(SQL, Tier.DISK, AdapterStatus.LOADING)), now)
    assert residency.loading_since(R0, SQL) == 10.0
    residency.apply(report(R0, 3, state(SQL)), 12.0)
    assert residency.loading_since(R0, SQL) is None


def test_what_came_nearer_is_told() -> None:
    residency = ResidencyMap()
    residency.apply(report(R0, 1, state(SQL, Tier.DISK), state(LEGAL)), 0)
    change = residency.apply(report(R0, 2, state(SQL, Tier.GPU), state(LEGAL, Tier.HOST)), 0)
    assert change == Change(gained=frozenset({SQL}))


def test_the_version_of_an_adapter_is_what_most_replicas_have() -> None:
    residency = ResidencyMap()
    for replica, digest in ((R0, "new"), (R1, "old"), (ReplicaId("replica-2"), "new")):
        residency.apply(report(replica, 1, state(SQL, digest=digest)), 0)
    assert residency.adapters() == {SQL: "new"}


contents = st.lists(
    st.builds(
        state,
        st.sampled_from([SQL, LEGAL, AdapterId("poem")]),
        st.sampled_from(Tier),
        st.sampled_from(AdapterStatus),
        st.sampled_from(["d1", "d2"]),
    ),
    unique_by=lambda s: s.adapter,
)


class ResidencyMachine(RuleBasedStateMachine):
    """Two replicas speak, restart and fall silent; the network repeats and reorders."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = ResidencyMap()
        self.said: dict[ReplicaId, list[ReplicaReport]] = {R0: [], R1: []}
        self.boots = {R0: 0, R1: 0}
        self.newest: dict[ReplicaId, ReplicaReport] = {}
        self.holds: dict[ReplicaId, dict[AdapterId, AdapterState]] = {R0: {}, R1: {}}
        self.heard: set[tuple[ReplicaId, str]] = set()  # lives
        self.now = 0.0

    @rule(replica=st.sampled_from([R0, R1]), adapters=contents, heard=st.booleans())
    def speak(self, replica: ReplicaId, adapters: list[AdapterState], heard: bool) -> None:
        boot = f"boot-{self.boots[replica]}"
        mine = report(replica, len(self.said[replica]), *adapters, boot=boot)
        self.said[replica].append(mine)
        if heard:
            self.deliver(mine)

    @precondition(lambda self: max(self.boots.values()) < 6)
    @rule(replica=st.sampled_from([R0, R1]), adapters=contents)
    def restart(self, replica: ReplicaId, adapters: list[AdapterState]) -> None:
        self.boots[replica] += 1
        self.speak(replica, adapters, heard=True)

    @rule(replica=st.sampled_from([R0, R1]), data=st.data())
    def echo(self, replica: ReplicaId, data: st.DataObject) -> None:
        """Any report of a life that was heard before: late, or again."""
        newest = self.newest.get(replica)
        if newest is not None:
            heard = [r for r in self.said[replica] if (replica, r.boot) in self.heard]
            self.deliver(data.draw(st.sampled_from(heard)))

    @rule(replica=st.sampled_from([R0, R1]))
    def lose(self, replica: ReplicaId) -> None:
        gone = self.residency.lose(replica).gone
        assert gone == self.holds[replica].keys()
        self.holds[replica] = {}

    def deliver(self, mine: ReplicaReport) -> None:
        self.now += 1
        self.heard.add((mine.replica, mine.boot))
        newest = self.newest.get(mine.replica)
        newer = newest is None or (mine.boot, mine.seq) > (newest.boot, newest.seq)
        assert (self.residency.apply(mine, self.now) is not None) == newer
        if newer:
            self.newest[mine.replica] = mine
            self.holds[mine.replica] = {
                s.adapter: s for s in mine.adapters if s.status is not AdapterStatus.FAILED
            }

    @invariant()
    def holds_what_was_said_last(self) -> None:
        self.residency.check()
        for adapter in (SQL, LEGAL, AdapterId("poem")):
            expected = {r: held[adapter] for r, held in self.holds.items() if adapter in held}
            assert dict(self.residency.holders(adapter)) == expected


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(stateful_step_count=30)


def test_replicas_on_one_store_need_not_name_what_is_on_its_disk() -> None:
    residency = ResidencyMap()
    on_disk = [state(adapter, Tier.DISK) for adapter in (SQL, LEGAL)]
    residency.listing("store", on_disk)
    for replica, held in ((R0, (state(SQL, Tier.HOST),)), (R1, ())):
        residency.apply(replace(report(replica, 1, *held), store="store"), 0)
        residency.check()
    assert {r: s.tier for r, s in residency.holders(SQL).items()} == {R0: "host", R1: "disk"}
    assert set(residency.near(SQL)) == {R0}
    assert set(residency.holders(LEGAL)) == {R0, R1}
    broken = state(LEGAL, Tier.DISK, AdapterStatus.FAILED)
    residency.apply(replace(report(R0, 2, broken), store="store"), 0)
    assert set(residency.holders(LEGAL)) == {R1}
    assert residency.holders(SQL)[R0].tier is Tier.DISK  # it fell, and is still served
    residency.lose(R1)
    residency.check()
    assert not residency.holders(LEGAL)
    assert residency.knows(LEGAL)
    assert residency.names() == [LEGAL, SQL]
