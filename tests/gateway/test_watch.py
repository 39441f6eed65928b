"""Following report streams: what the dispatcher knows, when, and after what breaks."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from scripted import Fleet, ScriptedReplica, until

from shared.wire import REPORTS_PATH


def states(it: Fleet) -> dict[str, str]:
    view = it.gateway.pump.dispatcher.view(it.gateway.pump.clock())
    return {one.replica: str(one.state) for one in view}


def value(it: Fleet, name: str, **labels: str) -> float:
    registry: CollectorRegistry = it.gateway.metrics.registry
    return registry.get_sample_value(f"loraplex_gateway_{name}", labels) or 0.0


async def test_a_report_is_known_within_a_moment_of_being_sent(fleet) -> None:
    one = ScriptedReplica("replica-0", adapters=("a",))
    async with fleet(one) as it:
        one.adapters = ("a", "b")
        await until(lambda: it.gateway.pump.dispatcher.knows("b"), within_s=1)
        one.adapters = ("b",)
        await until(lambda: "a" not in it.gateway.pump.dispatcher.adapters(), within_s=1)
        assert value(it, "reports_total", replica="replica-0", result="applied") >= 3


async def test_a_stopped_replica_is_lost_at_once_and_back_within_two_seconds(fleet) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        loop = asyncio.get_running_loop()
        await one.stop()
        await until(lambda: states(it) == {"replica-0": "lost"}, within_s=0.5)
        await asyncio.sleep(1)
        await one.start()
        began = loop.time()
        await until(lambda: states(it) == {"replica-0": "up"})
        assert loop.time() - began < 2.5


async def test_silence_is_loss_and_a_report_brings_it_back(fleet) -> None:
    one = ScriptedReplica("replica-0", heartbeat_s=0.1)
    async with fleet(one) as it:
        one.reporting = False
        await until(lambda: states(it)["replica-0"] == "lost", within_s=1.5)
        one.reporting = True
        await until(lambda: states(it)["replica-0"] == "up", within_s=2)


async def test_a_restarted_replica_is_a_new_life(fleet) -> None:
    one = ScriptedReplica("replica-0", adapters=("a",))
    async with fleet(one) as it:
        await one.stop()
        born_again = ScriptedReplica("replica-0", adapters=("b",), port=one.port)
        await born_again.start()  # its sequence numbers begin anew
        dispatcher = it.gateway.pump.dispatcher
        await until(lambda: set(dispatcher.adapters()) == {"b"}, within_s=3)
        await born_again.stop()


async def test_a_replica_of_another_name_is_not_taken_for_the_one_configured(fleet, caplog) -> None:
    wrong = ScriptedReplica("replica-9", reporting=False)
    await wrong.start()
    config = {"replicas": [{"id": "replica-0", "url": wrong.url}]}
    async with fleet(wrong, fleet=config) as it:
        wrong.reporting = True
        await until(lambda: value(it, "reports_total", replica="replica-0", result="foreign") > 0)
        assert states(it) == {"replica-0": "unknown"}
        assert "make them equal" in caplog.text


async def test_an_unreadable_line_is_counted_and_the_next_one_read(fleet) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        report = one.report

        class Nonsense:
            def __init__(self) -> None:
                self.said = 0

            async def reports(self, request: web.Request) -> web.StreamResponse:
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(b'{"replica": 7}\nnot json\n')
                from shared.wire import encode_report

                while True:
                    await response.write(encode_report(report()))
                    await asyncio.sleep(0.1)

        await one.stop()
        one._reports = Nonsense().reports
        await one.start()
        await until(
            lambda: value(it, "reports_total", replica="replica-0", result="unreadable") == 2
        )
        await until(lambda: states(it)["replica-0"] == "up")


async def test_a_fleet_token_opens_the_stream_and_a_wrong_one_is_told(fleet, caplog) -> None:
    caplog.set_level("DEBUG")
    one = ScriptedReplica("replica-0", token="t0")
    async with fleet(one, fleet={"token": "t0"}) as it:
        assert states(it) == {"replica-0": "up"}
        one.token = "t1"
        for connection in one._runner.server.connections:
            connection.transport.abort()
        await until(lambda: "fleet.token" in "".join(str(r.__dict__) for r in caplog.records))
        assert states(it) == {"replica-0": "lost"}


async def test_a_replica_that_is_no_replica_is_never_up(fleet) -> None:
    class Other(ScriptedReplica):
        async def _reports(self, request: web.Request) -> Any:
            return web.Response(status=404)

    one = Other("replica-0", reporting=False)
    async with fleet(one) as it:
        await asyncio.sleep(0.3)
        assert states(it) == {"replica-0": "unknown"}
        assert (await it.http.get("/readyz")).status_code == 503
        answer = await it.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
        assert REPORTS_PATH == "/reports"
