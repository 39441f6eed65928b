"""A fleet with a bad member: what its clients notice, for how long, and what the operator sees."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest
from scripted import BASE, Fleet, ScriptedReplica, chunks, until

ADMIN = {"authorization": "Bearer admin-secret"}
HEALTH: dict[str, Any] = {
    "failures": 2,
    "ejection_s": 0.3,
    "ejection_max_s": 2,
    "slow_samples": 3,
    "slow_s": 0.1,
    "window_s": 0.2,
    "slow_start_s": 0.4,
}


def fleet_of_three(**fields: Any) -> list[ScriptedReplica]:
    return [ScriptedReplica(f"replica-{n}", adapters=("shout",), **fields) for n in range(3)]


async def home_of(it: Fleet, model: str = "shout") -> ScriptedReplica:
    """The replica that a request for `model` goes to first."""
    name = (await it.chat(model)).headers["x-loraplex-replica"]
    home = next(one for one in it.replicas if one.name == name)
    home.received.clear()
    return home


def states(it: Fleet) -> dict[str, str]:
    view = it.gateway.pump.dispatcher.view(it.gateway.pump.clock())
    return {one.replica: str(one.state) for one in view}


def counted(it: Fleet, name: str, **labels: str) -> float:
    value = it.gateway.metrics.registry.get_sample_value(f"loraplex_gateway_{name}_total", labels)
    return value or 0.0


async def row_of(it: Fleet, one: ScriptedReplica) -> dict[str, Any]:
    rows = (await it.http.get("/admin/v1/replicas", headers=ADMIN)).json()["data"]
    return next(row for row in rows if row["replica"] == one.name)


# Ejection and return ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["fails", "raves", "resets", "dies_mid_stream"])
async def test_a_replica_that_goes_on_failing_is_ejected_and_tried_and_taken_back(
    fleet, fault: str
) -> None:
    admin = {"key": "admin-secret"}
    three = fleet_of_three(heartbeat_s=0.1)
    async with fleet(*three, health=HEALTH, admin=admin) as it:
        home = await home_of(it)
        home.answer = home.fails(500) if fault == "fails" else getattr(home, fault)
        for _ in range(100):  # a reset makes it suspect, until its next report
            await it.chat("shout", stream=True)
            if states(it)[home.name] == "ejected":
                break
            await asyncio.sleep(0.01)
        row = await row_of(it, home)
        assert (row["state"], row["ejected_for"]) == ("ejected", "failures")
        assert 0 < row["ejected_s_left"] <= 0.3
        asked = {"tenant": "acme", "model": "shout"}
        told = await it.http.get("/admin/v1/explain", params=asked, headers=ADMIN)
        refused = {one["replica"]: one["refused"] for one in told.json()["candidates"]}
        assert refused[home.name] == "ejected"
        assert counted(it, "ejections", replica=home.name, reason="failures") == 1
        home.received.clear()
        for _ in range(5):
            answer = await it.chat("shout")
            assert (answer.status_code, answer.headers["x-loraplex-replica"] != home.name) == (
                200,
                True,
            )
        assert home.received == []
        await until(lambda: states(it)[home.name] == "half_open", within_s=1)
        home.answer = None
        assert (await it.chat("shout")).headers["x-loraplex-replica"] == home.name  # the trial
        row = await row_of(it, home)
        assert (row["state"], row["slow_start"] < 1) == ("up", True)
        assert row["limit"] < row["capacity"]
        assert counted(it, "readmissions", replica=home.name) == 1
        await until(lambda: view_of(it, home).slow_start == 1, within_s=2)


def view_of(it: Fleet, one: ScriptedReplica) -> Any:
    view = it.gateway.pump.dispatcher.view(it.gateway.pump.clock())
    return next(row for row in view if row.replica == one.name)


async def test_a_failed_trial_goes_elsewhere_and_ejects_for_longer(fleet) -> None:
    async with fleet(*fleet_of_three(), health=HEALTH) as it:
        home = await home_of(it)
        home.answer = home.raves
        while states(it)[home.name] != "ejected":
            assert (await it.chat("shout")).status_code == 200
            await asyncio.sleep(0.01)
        await until(lambda: states(it)[home.name] == "half_open", within_s=1)
        home.received.clear()
        assert (await it.chat("shout")).status_code == 200
        assert len(home.received) == 1
        assert states(it)[home.name] == "ejected"
        left_s = view_of(it, home).ejected_until - it.gateway.pump.clock()
        assert 0.3 < left_s <= 0.6
        assert counted(it, "ejections", replica=home.name, reason="failures") == 2


async def test_only_one_request_tries_a_half_open_replica(fleet) -> None:
    async with fleet(*fleet_of_three(), health=HEALTH) as it:
        home = await home_of(it)
        home.answer = home.fails(500)
        for _ in range(2):
            await it.chat("shout")
        home.answer = home.slow(0.2)
        await until(lambda: states(it)[home.name] == "half_open", within_s=1)
        home.received.clear()
        answers = await asyncio.gather(*[it.chat("shout") for _ in range(6)])
        assert {answer.status_code for answer in answers} == {200}
        assert len(home.received) == 1


async def test_half_of_the_fleet_is_never_ejected(fleet) -> None:
    async with fleet(*fleet_of_three(), health={**HEALTH, "ejection_s": 2}) as it:
        for one in it.replicas:
            one.answer = one.fails(500)
        for _ in range(20):
            assert (await it.chat()).status_code == 500
        assert sorted(states(it).values()) == ["ejected", "up", "up"]


async def test_a_replica_much_slower_than_the_others_is_ejected(fleet) -> None:
    async with fleet(*fleet_of_three(heartbeat_s=0.1), health=HEALTH) as it:
        late = await home_of(it)
        late.answer = late.slow(0.4)
        tasks: list[asyncio.Future[Any]] = []

        async def traffic() -> None:
            while True:
                for model in ("shout", BASE):
                    tasks.append(asyncio.ensure_future(it.chat(model, stream=True)))
                await asyncio.sleep(0.03)

        load = asyncio.ensure_future(traffic())
        await until(lambda: states(it)[late.name] == "ejected", within_s=5)
        load.cancel()
        assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
        others = [one.name for one in it.replicas if one is not late]
        assert counted(it, "ejections", replica=late.name, reason="slow") >= 1
        assert [counted(it, "ejections", replica=name, reason="slow") for name in others] == [0, 0]


# Dead, frozen, and back -------------------------------------------------------------------------


async def test_a_refusing_replica_is_found_by_one_connection_although_it_reports(fleet) -> None:
    async with fleet(*fleet_of_three(heartbeat_s=4)) as it:
        home = await home_of(it)
        await home.refuse()
        for _ in range(10):
            answer = await it.chat("shout")
            assert (answer.status_code, answer.headers["x-loraplex-replica"] != home.name) == (
                200,
                True,
            )
        assert counted(it, "retries", reason="replica_lost") == 1
        assert states(it)[home.name] == "suspect"


async def test_a_dead_replica_is_used_again_within_two_seconds_of_being_well(fleet) -> None:
    async with fleet(*fleet_of_three()) as it:
        home = await home_of(it)
        loop = asyncio.get_running_loop()
        await home.stop()
        await asyncio.sleep(1.5)  # the pauses between probes have grown
        home.reboot()
        await home.start()
        began = loop.time()
        while (await it.chat("shout")).headers["x-loraplex-replica"] != home.name:
            assert loop.time() - began < 2
            await asyncio.sleep(0.02)


async def test_one_frozen_of_three_delays_only_its_own_and_those_no_longer_than_the_limit(
    fleet,
) -> None:
    forward = {"first_byte_timeout_s": 0.5}
    async with fleet(*fleet_of_three(), forward=forward, health=HEALTH) as it:
        loop = asyncio.get_running_loop()
        home = await home_of(it)
        home.answer = home.freezes
        began = loop.time()
        stuck = [asyncio.ensure_future(it.chat("shout", stream=True)) for _ in range(3)]
        await until(lambda: len(home.received) == 3)
        for _ in range(6):
            others = [one.name for one in it.replicas if one is not home]
            asked = loop.time()
            answer = await it.chat()
            if answer.headers["x-loraplex-replica"] in others:
                assert loop.time() - asked < 0.3
        answers = await asyncio.gather(*stuck)
        assert 0.5 <= loop.time() - began < 2
        assert {answer.status_code for answer in answers} == {200}
        assert home.name not in {answer.headers["x-loraplex-replica"] for answer in answers}
        assert states(it)[home.name] == "ejected"  # it timed out in a row
        await until(lambda: len(home.left) >= 3, within_s=1)


async def test_timeouts_may_be_a_replicas_own(fleet) -> None:
    three = fleet_of_three()
    for one in three:
        await one.start()
    entries = [{"id": one.name, "url": one.url, "first_byte_timeout_s": 0.2} for one in three]
    async with fleet(*three, fleet={"replicas": entries}) as it:
        for one in three:
            one.answer = one.freezes
        began = asyncio.get_running_loop().time()
        answer = await it.chat("shout")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "replica_timeout")
        assert asyncio.get_running_loop().time() - began < 2


async def test_reports_that_freeze_are_a_loss_and_free_who_waits_there(fleet) -> None:
    async with fleet(*fleet_of_three(heartbeat_s=0.1)) as it:
        home = await home_of(it)
        home.answer = home.freezes
        asked = asyncio.ensure_future(it.chat("shout"))
        await until(lambda: home.received)
        home.reporting = False
        await until(lambda: states(it)[home.name] == "lost", within_s=2)
        answer = await asyncio.wait_for(asked, 2)
        assert (answer.status_code, answer.headers["x-loraplex-replica"] != home.name) == (
            200,
            True,
        )


async def test_a_stall_of_our_own_loop_loses_no_replica(fleet) -> None:
    async with fleet(*fleet_of_three(heartbeat_s=0.1)) as it:
        lost: list[str] = []
        dispatcher = it.gateway.pump.dispatcher
        lose = dispatcher.replica_lost
        dispatcher.replica_lost = lambda replica, now: (lost.append(replica), lose(replica, now))
        running = asyncio.ensure_future(it.chat("shout", stream=True))
        for _ in range(3):
            time.sleep(0.6)  # noqa: ASYNC251  # twice the silence that is a loss
            await asyncio.sleep(0.1)
        assert lost == []
        assert set(states(it).values()) == {"up"}
        assert (await running).status_code == 200


# The budget -------------------------------------------------------------------------------------


async def test_with_the_budget_spent_the_first_error_is_told(fleet) -> None:
    forward = {"retry_share": 0, "retry_floor": 3}
    async with fleet(*fleet_of_three(), forward=forward) as it:
        home = await home_of(it)
        home.answer = home.fails(429)
        statuses = [(await it.chat("shout")).status_code for _ in range(5)]
        assert statuses == [200, 200, 200, 503, 503]
        assert counted(it, "retries", reason="replica_busy") == 3
        assert counted(it, "retries_denied") == 2
        assert states(it)[home.name] == "up"  # busy is not ill


async def test_the_budget_grows_with_the_requests(fleet) -> None:
    forward = {"retry_share": 0.5, "retry_floor": 0}
    async with fleet(*fleet_of_three(), forward=forward) as it:
        home = await home_of(it)
        for _ in range(9):
            await it.chat("shout")
        home.answer = home.fails(429)
        statuses = [(await it.chat("shout")).status_code for _ in range(8)]
        assert statuses.count(200) >= 5


# Slow start -------------------------------------------------------------------------------------


async def test_a_fresh_replica_is_not_flooded(fleet) -> None:
    three = fleet_of_three(capacity=16, heartbeat_s=0.2)
    async with fleet(*three, health={**HEALTH, "slow_start_s": 1.5}) as it:
        await asyncio.sleep(1.6)  # what joins from now on, joins a running fleet
        fresh = it.replicas[0]
        for one in it.replicas:
            one.answer = one.freezes
        await fresh.stop()
        await until(lambda: states(it)[fresh.name] == "lost", within_s=1)
        fresh.reboot()
        await fresh.start()
        await until(lambda: states(it)[fresh.name] == "up", within_s=2)
        tasks = [asyncio.ensure_future(it.chat()) for _ in range(24)]
        await until(lambda: sum(len(one.received) for one in it.replicas) == 24)
        assert len(fresh.received) < 8
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: view_of(it, fresh).limit == 18, within_s=3)


# Clients that leave -----------------------------------------------------------------------------


async def test_a_client_that_leaves_while_its_adapter_loads_aborts_there_too(fleet) -> None:
    """The replica has begun its stream, and says only that it is alive."""

    async def loads(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        while True:
            await response.write(b": loading\n\n")
            await asyncio.sleep(0.05)

    one = ScriptedReplica("replica-0")
    one.answer = loads
    async with fleet(one) as it:
        task = asyncio.ensure_future(it.chat(stream=True))
        await until(lambda: one.received)
        await asyncio.sleep(0.1)
        task.cancel()
        await until(lambda: one.left, within_s=1)
        await until(lambda: it.gateway.pump.dispatcher.in_flight == 0, within_s=1)


async def raw(it: Fleet, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a socket of its own."""
    host, port = it.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent = orjson.dumps({"model": BASE, "messages": [{"role": "user", "content": "hi"}], **body})
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
        b"content-length: %d\r\n\r\n%b" % (it.key.encode(), len(sent), sent)
    )
    return reader, writer


@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_is_gone_is_gone_upstream_within_a_second(
    fleet, phase: str, how: str
) -> None:
    async def decodes(request: Any, body: Any) -> Any:
        response = await one.begin(request)
        await response.write(chunks(BASE)[0])
        await asyncio.Event().wait()
        return response

    one = ScriptedReplica("replica-0", capacity=1)
    one.answer = decodes if phase == "decode" else one.freezes
    async with fleet(one) as it:
        dispatcher = it.gateway.pump.dispatcher
        held = [asyncio.ensure_future(it.chat()) for _ in range(2 if phase == "queue" else 0)]
        await until(lambda: dispatcher.in_flight == len(held))
        reader, writer = await raw(it, stream=True)
        if phase == "queue":
            await until(lambda: dispatcher.queued == 1)
        else:
            await until(lambda: one.received)
        if phase == "decode":
            await reader.readuntil(b"\n\n")
        if how == "close":
            writer.close()
        else:
            writer.transport.abort()
        gone = (lambda: dispatcher.queued == 0) if phase == "queue" else (lambda: one.left)
        await until(gone, within_s=1)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await until(lambda: dispatcher.in_flight == 0, within_s=1)
        dispatcher.check()


# Drain ------------------------------------------------------------------------------------------


async def test_what_outlives_a_drain_ends_with_an_error_wherever_it_is(fleet) -> None:
    one = ScriptedReplica("replica-0", capacity=1)
    one.answer = one.freezes
    async with fleet(one, forward={"drain_s": 0.3, "keepalive_s": 0.1}) as it:
        dispatcher = it.gateway.pump.dispatcher
        plain = asyncio.ensure_future(it.chat())
        streamed = asyncio.ensure_future(it.chat(stream=True))
        await until(lambda: dispatcher.in_flight == 2)
        queued = asyncio.ensure_future(it.chat(stream=True))
        await until(lambda: dispatcher.queued == 1)
        await asyncio.sleep(0.15)  # the streams have begun, with a comment
        draining = asyncio.ensure_future(it.gateway.drain(asyncio.Event()))
        await asyncio.sleep(0)
        assert (await it.http.get("/readyz")).status_code == 503
        await draining
        answer = await plain
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "server_shutting_down"
        for task in (streamed, queued):
            answer = await task
            assert answer.status_code == 200
            assert "server_shutting_down" in answer.text
            assert "[DONE]" not in answer.text
        await until(lambda: len(one.left) == 2, within_s=1)
        dispatcher.check()


async def test_a_drain_without_work_ends_at_once(fleet) -> None:
    async with fleet(ScriptedReplica("replica-0"), forward={"drain_s": 30}) as it:
        async with asyncio.timeout(1):
            await it.gateway.drain(asyncio.Event())
