"""Pools: merged first, high ranks and bases apart; and a decision that costs the same anywhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.dispatcher import Arrival, Base, Dispatch, Dispatcher
from gateway.core.fleet import Fleet
from gateway.core.pools import Pools
from gateway.core.replica import Replica
from gateway.core.ring import AdapterRing
from shared.ids import AdapterId, ReplicaId, RequestId, TenantId
from shared.messages import AdapterState, AdapterStatus, ReplicaReport, Tier

SETTINGS: dict[str, Any] = {
    "load_factor": 1.25, "load_floor": 4, "vnodes": 32, "service_s": 0.05, "host_load_s": 0.005,
    "disk_load_s": 0.15, "hop_s": 0.002, "per_tenant_max": 100, "ttl_s": 60.0,
    "input_weight": 1.0, "output_weight": 2.0, "warm_wait_s": 0.5, "silence_heartbeats": 1e6,
}  # fmt: skip


def report(
    replica: str, states: Sequence[AdapterState] = (), *, base: str = "base", **more: Any
) -> ReplicaReport:
    return ReplicaReport(
        replica=ReplicaId(replica), boot="b", seq=1, base=base, slots=8, capacity=8, running=0,
        waiting=0, pages_total=1, pages_free=1, max_model_len=128, heartbeat_s=1.0,
        adapters=tuple(states), **more,
    )  # fmt: skip


def holds(adapter: str, tier: Tier = Tier.GPU, **more: Any) -> AdapterState:
    return AdapterState(AdapterId(adapter), "d", tier, **more)


def fleet_of(*reports: ReplicaReport) -> Dispatcher:
    core = Dispatcher(**SETTINGS)
    for one in reports:
        core.replica_added(one.replica, 0)
        core.report(one, 0)
    return core


class Asking:
    def __init__(self, core: Dispatcher) -> None:
        self.core, self.count = core, 0

    def __call__(self, adapter: str | None, base: str = "") -> str | None:
        self.count += 1
        name = None if adapter is None else AdapterId(adapter)
        request = RequestId(str(self.count))
        arrival = Arrival(request, TenantId("t"), 1.0, name, 1, 1, base=base)
        dispatch = self.core.place(arrival, 0)
        self.core.check()
        return None if dispatch is None else dispatch.placement.replica


def test_a_merged_replica_is_filled_before_the_shared_ones() -> None:
    ask = Asking(
        fleet_of(
            report("merged-0", [holds("hot")], merged=AdapterId("hot")),
            report("replica-0", [holds("hot"), holds("other")]),
            report("replica-1", [holds("hot"), holds("other")]),
        )
    )
    placed = [ask("hot") for _ in range(10)]
    assert placed[:8] == ["merged-0"] * 8
    assert set(placed[8:]) != {"merged-0"}
    assert all(ask("other") in ("replica-0", "replica-1") for _ in range(4))
    assert all(ask(None, "base") in ("replica-0", "replica-1") for _ in range(4))


def test_a_high_rank_goes_to_its_pool_and_ordinary_ones_stay_out_while_they_can() -> None:
    refused = holds("wide", Tier.DISK, status=AdapterStatus.FAILED, reason="rank over cap")
    ask = Asking(
        fleet_of(
            *(report(f"replica-{n}", [holds("plain"), refused], max_rank=16) for n in range(2)),
            report("wide-0", [holds("plain"), holds("wide")], max_rank=256),
        )
    )
    assert ask("wide") == "wide-0"
    assert all(ask("plain") in ("replica-0", "replica-1") for _ in range(8))


def test_a_request_for_a_base_never_goes_to_another_base() -> None:
    core = fleet_of(
        report("a-0", [holds("x")], base="llama"), report("b-0", [holds("y")], base="qwen")
    )
    ask = Asking(core)
    assert {ask(None, "llama") for _ in range(8)} == {"a-0"}
    assert {ask(None, "qwen") for _ in range(4)} == {"b-0"}
    assert (ask("x"), ask("y")) == ("a-0", "b-0")
    refused = {t.replica: t.refused for t in core.explain(Base("qwen"), 0)}
    assert refused == {"b-0": "", "a-0": "absent"}


def test_a_full_base_waits_for_its_own_replicas() -> None:
    core = fleet_of(report("a-0", base="llama"), report("b-0", base="qwen"))
    for number in range(20):
        arrival = Arrival(RequestId(str(number)), TenantId("t"), 1.0, None, 1, 1, base="llama")
        core.arrive(arrival, 0)
    placed = [d.placement.replica for d in core.poll(0) if isinstance(d, Dispatch)]
    assert placed == ["a-0"] * 9
    core.finish(RequestId("0"), None, None, 0)
    assert [d.placement.replica for d in core.poll(0) if isinstance(d, Dispatch)] == ["a-0"]
    core.check()


changes = st.lists(
    st.tuples(
        st.integers(0, 5), st.sampled_from(["begin", "finish", "drain", "resume", "lose", "move"])
    ),
    max_size=60,
)


@given(changes)
def test_sums_and_the_least_loaded_equal_a_recount(steps: list[tuple[int, str]]) -> None:
    fleet = Fleet(service_s=0.05, silence_heartbeats=3, vnodes=4)
    flying: dict[ReplicaId, list[RequestId]] = {}
    seqs = 0
    for n in range(6):
        fleet.add(ReplicaId(f"r{n}"), 0)
        fleet.report(report(f"r{n}"), 0)
    for at, (n, what) in enumerate(steps):
        replica = ReplicaId(f"r{n}")
        mine = fleet.replicas[replica]
        if what == "begin" and mine.open:
            fleet.begin(RequestId(str(at)), replica, AdapterId("x"), 0)
            flying.setdefault(replica, []).append(RequestId(str(at)))
        elif what == "finish" and flying.get(replica):
            fleet.finish(flying[replica].pop(), 0)
        elif what in ("drain", "resume"):
            fleet.drain(replica, on=what == "drain", now=0)
        elif what == "lose":
            fleet.lose(replica, 0)
        elif what == "move":  # it restarts with another base
            seqs += 1
            fleet.report(report(f"r{n}", base=f"base-{seqs % 2}"), 0)
        fleet.check()


def test_one_that_does_not_say_its_rank_cap_is_with_the_others_of_its_base() -> None:
    pools = Pools(vnodes=4)
    for name, rank in (("native", 64), ("other", 0)):
        mine = Replica(ReplicaId(name), 0.05)
        mine.said = report(name, max_rank=rank)
        pools.reported(mine)
    assert len(list(pools)) == 1


def work(core: Dispatcher, adapters: Sequence[str]) -> int:
    """Lines of the gateway's core that deciding about these takes, most for one of them."""
    core.explain(AdapterId(adapters[0]), 0)  # the circle is drawn, once for the fleet
    most = 0
    for number, adapter in enumerate(adapters):
        lines = 0

        def count(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if "gateway/core" not in frame.f_code.co_filename.replace("\\", "/"):
                return None
            lines += event == "line"
            return count

        request = RequestId(f"{number}")
        arrival = Arrival(request, TenantId("t"), 1.0, AdapterId(adapter), 1, 1)
        sys.settrace(count)
        try:
            assert core.place(arrival, 0) is not None
        finally:
            sys.settrace(None)
        core.finish(request, None, None, 0)
        most = max(most, lines)
    return most


def shared_store(replicas: int, adapters: Sequence[str]) -> Dispatcher:
    """Every replica serves all from one store; the first halves of the names have two owners."""
    core, ring = Dispatcher(**SETTINGS), AdapterRing(vnodes=32)
    names = [ReplicaId(f"replica-{n}") for n in range(replicas)]
    for name in names:
        ring.add(name)
    owned: dict[ReplicaId, list[AdapterState]] = {name: [] for name in names}
    for adapter in adapters[: len(adapters) // 2]:
        for name in ring.near(AdapterId(adapter))[:2]:
            owned[name].append(holds(adapter, Tier.HOST))
    core.listing("store", [holds(adapter, Tier.DISK) for adapter in adapters], 0)
    for name in names:
        core.replica_added(name, 0)
        core.report(report(name, owned[name], store="store"), 0)
    return core


def test_a_decision_takes_no_more_work_in_a_fleet_of_a_thousand() -> None:
    adapters = [f"adapter-{n}" for n in range(60)]
    small, large = (work(shared_store(count, adapters), adapters) for count in (40, 1000))
    assert large <= 1.1 * small
