"""The gateway's spans of requests that do not go straight; the collector is small, but real."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from collector import Collector, Seen, collecting
from scripted import BASE, ScriptedReplica, until

from gateway.state.tenants import Limits

ASK = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "tracestate": "a=b"}
ATTEMPT = ["queue", "route", "forward", "first_token"]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(autouse=True)
def fresh(collector: Collector) -> None:
    collector.spans.clear()


def traced(collector: Collector, **settings: Any) -> dict[str, Any]:
    return {"tracing": {"endpoint": collector.url, **settings}}


async def spans_of(collector: Collector, trace: str = TRACE) -> list[Seen]:
    return await asyncio.to_thread(collector.trace, trace, services=1)


def names(spans: list[Seen]) -> list[str]:
    return [one.name for one in spans]


async def post(it: Any, headers: dict[str, str] = PARENT, **body: Any) -> Any:
    return await it.http.post("/v1/chat/completions", json={**ASK, **body}, headers=headers)


async def test_each_attempt_has_its_stages_and_the_failed_one_its_fault(
    fleet: Any, collector: Collector
) -> None:
    replicas = [ScriptedReplica(f"replica-{n}") for n in range(2)]
    async with fleet(*replicas, **traced(collector)) as it:
        first = (await post(it, {})).headers["x-loraplex-replica"]
        [broken] = [one for one in replicas if one.name == first]
        broken.answer = broken.resets
        reply = await post(it)
        assert reply.status_code == 200
        spans = await spans_of(collector)
    root, admit, *rest = spans
    assert (root.kind, admit.name) == (2, "admit")
    assert sorted(names(rest)) == sorted(ATTEMPT * 2)
    one, two = (each for each in rest if each.name == "forward")
    assert (one.error, two.error, root.error) == (True, False, False)
    assert one.about["loraplex.replica"] == first != two.about["loraplex.replica"]
    assert root.about["loraplex.replica"] == reply.headers["x-loraplex-replica"]
    asked = {each.name: each.received[-1][0].headers for each in replicas}
    for attempt in (one, two):  # what each replica does is below the attempt that asked it
        header = asked[attempt.about["loraplex.replica"]]["traceparent"]
        assert header == f"00-{TRACE}-{attempt.span}-01"


async def test_a_kept_connection_that_was_dead_is_no_attempt(
    fleet: Any, collector: Collector
) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one, **traced(collector)) as it:
        await post(it, {})
        for connection in [*one._runner.server.connections]:
            if connection not in one._followers:
                connection.transport.abort()
        assert (await post(it)).status_code == 200
        spans = await spans_of(collector)
    assert sorted(names(spans)[1:]) == sorted(["admit", *ATTEMPT])


async def test_who_is_refused_or_leaves_ends_in_the_stage_it_had_come_to(
    fleet: Any, collector: Collector
) -> None:
    one = ScriptedReplica("replica-0", capacity=1)  # the gateway gives it two
    limits = Limits(requests_per_min=3)
    async with fleet(one, limits=limits, **traced(collector)) as it:
        one.answer = one.freezes
        held = [asyncio.ensure_future(post(it, {})) for _ in range(2)]
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 2)
        waits = asyncio.ensure_future(post(it))
        await until(lambda: it.gateway.pump.dispatcher.queued == 1)
        waits.cancel()
        left = await spans_of(collector)
        assert (names(left)[1:], left[0].about["loraplex.outcome"]) == (["admit", "queue"], "cut")
        other = "d" * 32
        denied = await post(it, {"traceparent": f"00-{other}-00f067aa0ba902b7-01"})
        assert denied.status_code == 429
        refused = await spans_of(collector, other)
        assert names(refused)[1:] == ["admit"]
        assert refused[0].about["error.type"] == "quota"
        assert refused[0].about["loraplex.outcome"] == "refused"
        for each in held:
            each.cancel()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "by the framework"])
async def test_a_trace_that_nobody_samples_goes_on_as_it_came(
    fleet: Any, collector: Collector, packed: bool
) -> None:
    one = ScriptedReplica("replica-0")
    given = PARENT | {"traceparent": PARENT["traceparent"][:-1] + "0"}
    more = {"content-encoding": "identity"} if packed else {}
    async with fleet(one, **traced(collector, ratio=0)) as it:
        await it.http.post(
            "/v1/chat/completions",
            content=orjson.dumps(ASK),
            headers={**given, **more, "content-type": "application/json"},
        )
        await post(it, {})
    headers = one.received[0][0].headers
    assert {name: headers[name] for name in given} == given
    new = one.received[1][0].headers["traceparent"]  # so that whoever is asked samples neither
    assert new.endswith("-02")
    assert not collector.spans


async def test_without_a_collector_a_trace_goes_on_as_it_came(fleet: Any) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        await post(it)
        await post(it, {})
    headers = one.received[0][0].headers
    assert {name: headers[name] for name in PARENT} == PARENT
    assert "traceparent" not in one.received[1][0].headers
