"""When a replica speaks: on change, not too often, never silent for a heartbeat."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.reports import Reports
from shared.ids import ReplicaId
from shared.messages import ReplicaReport
from shared.wire import decode_report

QUIET = ReplicaReport(
    replica=ReplicaId("r"),
    boot="b",
    seq=0,
    base="m",
    slots=2,
    capacity=4,
    running=0,
    waiting=0,
    pages_total=160,
    pages_free=160,
    max_model_len=100,
    heartbeat_s=1,
)


class Speaker:
    def __init__(self) -> None:
        self.state = QUIET
        self.said: list[tuple[float, ReplicaReport]] = []
        self.now = 0.0
        self.reports = Reports(
            draft=lambda: self.state,
            publish=lambda report: self.said.append((self.now, report)),
            interval_s=0.05,
            heartbeat_s=1.0,
        )

    def at(self, now: float, *, urgent: bool = False, **changes: int) -> None:
        self.now, self.state = now, replace(self.state, **changes)
        self.reports.tick(now, urgent=urgent)


def test_a_change_is_said_but_not_before_the_interval() -> None:
    speaker = Speaker()
    speaker.at(0.0)
    speaker.at(0.01, running=1)
    assert [at for at, _ in speaker.said] == [0.0]
    assert speaker.reports.due() == pytest.approx(0.05)
    speaker.at(0.05)
    assert [report.running for _, report in speaker.said] == [0, 1]


def test_what_is_servable_is_said_at_once() -> None:
    speaker = Speaker()
    speaker.at(0.0)
    speaker.at(0.001, urgent=True)
    assert [report.seq for _, report in speaker.said] == [0, 1]


def test_pages_that_move_a_little_are_no_news() -> None:
    speaker = Speaker()
    speaker.at(0.0, pages_free=159)
    speaker.at(0.1, pages_free=155)
    assert len(speaker.said) == 1
    speaker.at(0.2, pages_free=120)
    assert len(speaker.said) == 2


@given(
    steps=st.lists(st.tuples(st.floats(0.001, 0.4), st.integers(0, 3), st.booleans()), max_size=60)
)
def test_never_silent_never_too_often_and_numbered(steps: list[tuple[float, int, bool]]) -> None:
    speaker = Speaker()
    speaker.at(0.0)
    now = 0.0
    for wait, running, urgent in steps:
        now += wait
        while speaker.reports.due() < now:
            speaker.at(speaker.reports.due())
        speaker.at(now, running=running, urgent=urgent)
        last_at, last = speaker.said[-1]
        assert now - last_at <= 1.0 + 1e-9
        assert last.running == running or now - last_at < 0.05 + 1e-9
    assert [report.seq for _, report in speaker.said] == list(range(len(speaker.said)))


async def test_the_stream_begins_with_a_snapshot_and_goes_on_with_changes(serve: Any) -> None:
    served = await serve(heartbeat_s=0.2, report_interval_s=0.01)
    async with served.http.get(served.url + "/reports") as reply:
        assert reply.headers["content-type"] == "application/x-ndjson"
        first = decode_report(await reply.content.readline())
        assert [state.adapter for state in first.adapters] == [
            "ada", "bob", "cyd", "dee", "eve", "fay"
        ]  # fmt: skip
        assert (first.base, first.slots, first.replica) == ("tiny", 2, "replica-0")
        await served.tokens("ada")
        tiers = set()
        async with asyncio.timeout(5):
            while "gpu" not in tiers:
                report = decode_report(await reply.content.readline())
                tiers = {state.tier.value for state in report.adapters}
        assert report.seq > first.seq
        assert report.boot == first.boot


async def test_an_idle_replica_is_heard_each_heartbeat(serve: Any) -> None:
    served = await serve(heartbeat_s=0.1)
    async with served.http.get(served.url + "/reports") as reply:
        async with asyncio.timeout(5):
            reports = [decode_report(await reply.content.readline()) for _ in range(5)]
    steps = [after.seq - before.seq for before, after in pairwise(reports)]
    assert set(steps) <= {0, 1}  # a late engine's last line is told again rather than nothing
    assert sum(steps) >= 2
