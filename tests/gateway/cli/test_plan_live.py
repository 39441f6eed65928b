"""`loraplex plan --live`: what it makes of a fleet's facts, and that it finds them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from scripted import ScriptedReplica
from typer.testing import CliRunner

from loadtests.__main__ import app
from loadtests.fleet_advice import AdapterFacts, FleetFacts, ReplicaFacts, advise
from loadtests.proposal import Level
from shared.messages import ReplicaReport, Tier

ADMIN_KEY = "operators-only-0123456789"


def adapter(name: str, **changes: Any) -> AdapterFacts:
    usual: dict[str, Any] = {"requests": 10, "tokens": 1000, "rank": 16, "size_bytes": 1 << 20}
    return AdapterFacts(adapter=name, **(usual | {"in_slots": 1, "in_memory": 1} | changes))


REPLICA = ReplicaFacts(
    replica="replica-0", base="tiny", slots=4, capacity=8, busy=3, waiting=0, max_resident=4
)
WELL = FleetFacts(
    watched_s=10,
    requests=100,
    evictions=5,
    placed={"home": 95, "warm": 5},
    queue_p99_s=0.01,
    first_token_p99_s=0.1,
    ledger_s=86_400,
    replicas=(REPLICA, replace(REPLICA, replica="replica-1")),
    adapters=tuple(adapter(f"a{n}") for n in range(20)),
)


def levels(facts: FleetFacts) -> dict[str, Level]:
    return {one.topic: one.level for one in advise(facts)}


def said(facts: FleetFacts, topic: str) -> str:
    return next(one.say for one in advise(facts) if one.topic == topic)


def test_a_fleet_that_is_well_is_told_so_with_reasons() -> None:
    assert set(levels(WELL).values()) == {Level.OK}
    assert all(one.because for one in advise(WELL))


def test_thrash_names_the_knob_and_the_replicas_that_are_full() -> None:
    thrash = replace(WELL, evictions=60)
    assert levels(thrash)["slots"] is Level.WARNING
    assert "max_loras to 8 on replica-0, replica-1" in said(thrash, "slots")
    roomy = tuple(replace(one, max_resident=2) for one in WELL.replicas)
    assert "pages" in said(replace(thrash, replicas=roomy), "slots")


def test_a_working_set_over_host_memory_comes_before_slots() -> None:
    far = (*WELL.adapters, adapter("far", in_slots=0, in_memory=0))
    lines = advise(replace(WELL, evictions=60, adapters=far))
    assert [one.topic for one in lines][:2] == ["host", "slots"]
    assert lines[0].level is Level.WARNING
    assert "host_bytes" in lines[0].say
    cold = replace(WELL, placed={"home": 90, "cold": 10})
    assert levels(cold)["host"] is Level.WARNING
    idle = (*WELL.adapters, adapter("idle", in_slots=0, in_memory=0, requests=0))
    assert levels(replace(WELL, adapters=idle))["host"] is Level.OK


def test_full_places_or_a_long_queue_ask_for_replicas() -> None:
    full = tuple(replace(one, busy=8.0) for one in WELL.replicas)
    assert said(replace(WELL, replicas=full), "replicas").startswith("3 replicas")
    assert levels(replace(WELL, queue_p99_s=4.0))["replicas"] is Level.WARNING


def test_an_adapter_with_a_replica_of_work_is_to_be_merged() -> None:
    first = adapter("first", tokens=1_000_000)
    busy = tuple(replace(one, busy=6.0) for one in WELL.replicas)
    told = replace(WELL, replicas=busy, adapters=(first, *WELL.adapters))
    assert "first a replica of its own" in said(told, "merge")
    assert levels(WELL)["merge"] is Level.OK


def test_a_rank_far_above_the_others_and_an_empty_fleet_are_spoken_of() -> None:
    high = (*WELL.adapters, adapter("high", rank=256))
    assert "high" in said(replace(WELL, adapters=high), "ranks")
    assert levels(replace(WELL, replicas=())) == {"replicas": Level.WARNING}


class Restless(ScriptedReplica):
    """Its one slot holds another adapter once it was asked for one."""

    def report(self) -> ReplicaReport:
        said = super().report()
        turn = int(bool(self.received))
        states = [
            replace(state, tier=Tier.GPU if at == turn else Tier.DISK)
            for at, state in enumerate(said.adapters)
        ]
        return replace(said, adapters=tuple(states))


async def test_a_live_fleet_is_watched_through_the_admin_api(fleet: Any) -> None:
    one = Restless("replica-0", adapters=("pirate", "shout"), heartbeat_s=0.1)
    async with fleet(one, admin={"key": ADMIN_KEY}) as it:

        def look(*words: str) -> Any:
            there = {"LORAPLEX_ADMIN_KEY": ADMIN_KEY, "LORAPLEX_GATEWAY": it.url}
            return CliRunner().invoke(app, ["plan", "--live", *words], env=there)

        async def ask() -> None:
            await asyncio.sleep(0.2)
            for _ in range(12):
                assert (await it.chat("pirate")).status_code == 200

        done, _ = await asyncio.gather(asyncio.to_thread(look, "--watch", "1.3", "--json"), ask())
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        facts = told["facts"]
        assert facts["requests"] == 12
        assert facts["evictions"] >= 1
        assert [row["replica"] for row in facts["replicas"]] == ["replica-0"]
        assert {row["adapter"] for row in facts["adapters"]} == {"pirate", "shout"}
        assert told["advice"][0]["topic"] == "host"
        await it.usage()  # every record is in the store
        again = json.loads((await asyncio.to_thread(look, "--watch", "0", "--json")).stdout)
        assert [row["requests"] for row in again["facts"]["adapters"]] == [12, 0]
        assert again["facts"]["queue_p99_s"] is not None
        text = await asyncio.to_thread(look, "--watch", "0")
        assert "host:" in text.stdout
        wrong = await asyncio.to_thread(
            CliRunner().invoke, app, ["plan", "--live", "--gateway", "http://127.0.0.1:9"]
        )
        assert wrong.exit_code == 1
