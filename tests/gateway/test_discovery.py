"""A service's pods are followed by DNS: a real DNS server, real sockets, one gateway that stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from dns_server import SRV, DnsServer
from scripted import DONE, Answer, ScriptedReplica, chunks, started, until

from gateway.discovery.service import LookupFailed, ServiceLookup
from gateway.fleet_config import DiscoveryConfig, ServiceEntry, address_of
from gateway.metrics import Metrics


def lookup(server: DnsServer, **more: Any) -> ServiceLookup:
    config = DiscoveryConfig(nameservers=(server.address,), **{"timeout_s": 0.5, **more})
    return ServiceLookup(
        ServiceEntry(srv=SRV), config, told=lambda entries: None, metrics=Metrics()
    )


def found_by(server: DnsServer) -> dict[str, Any]:
    """A gateway's section that asks this server, soon and often."""
    return {
        "services": [{"srv": SRV}],
        "nameservers": [server.address],
        "interval_s": 0.05,
        "timeout_s": 0.5,
    }


def chatters(replica: ScriptedReplica, until_set: asyncio.Event) -> Answer:
    """A stream that goes on until it may end."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await replica.begin(request)
        for one in chunks(body["model"])[:-1]:
            await response.write(one)
        while not until_set.is_set():
            await response.write(chunks(body["model"])[1])
            await asyncio.sleep(0.05)
        await response.write(chunks(body["model"])[-1] + DONE)
        return response

    return answer


def members(it: Any) -> set[str]:
    return {view.replica for view in it.gateway.pump.dispatcher.view(0.0)}


def up(it: Any) -> set[str]:
    return {v.replica for v in it.gateway.pump.dispatcher.view(0.0) if v.state == "up"}


def boots(it: Any) -> dict[str, str]:
    return {v.replica: v.boot for v in it.gateway.pump.dispatcher.view(0.0) if v.state == "up"}


async def count(it: Any, name: str) -> float:
    text = (await it.http.get("/metrics")).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"loraplex_gateway_{name} ")]
    return float(line.split()[-1])


async def test_one_answer_names_the_pods_and_says_where_they_are() -> None:
    async with DnsServer() as server:
        server.pods = {"lora-replica-0": ("10.0.0.1", 8000), "lora-replica-1": ("10.0.0.2", 8001)}
        found = await lookup(server).look_up()
        assert {name: entry.url for name, entry in found.items()} == {
            "lora-replica-0": "http://10.0.0.1:8000",
            "lora-replica-1": "http://10.0.0.2:8001",
        }
        assert server.asked == [("udp", "SRV")]


async def test_addresses_that_do_not_come_along_are_asked_for() -> None:
    async with DnsServer() as server:
        server.pods, server.glue = {"lora-replica-0": ("10.0.0.1", 8000)}, False
        assert {e.url for e in (await lookup(server).look_up()).values()} == {
            "http://10.0.0.1:8000"
        }
        assert server.asked == [("udp", "SRV"), ("udp", "A")]


async def test_an_answer_too_long_for_a_datagram_is_fetched_by_tcp() -> None:
    async with DnsServer() as server:
        server.pods = {f"lora-replica-{n}": (f"10.0.1.{n}", 8000) for n in range(100)}
        assert len(await lookup(server).look_up()) == 100
        assert server.asked == [("udp", "SRV"), ("tcp", "SRV")]
        assert len(await lookup(server, members_max=7).look_up()) == 7


async def test_no_such_service_is_an_answer_and_silence_or_a_failure_is_none() -> None:
    async with DnsServer() as server:
        assert await lookup(server).look_up() == {}
        server.broken = True
        with pytest.raises(LookupFailed, match="SERVFAIL"):
            await lookup(server).look_up()
        server.silent = True
        with pytest.raises(LookupFailed, match=r"0.2 s"):
            await lookup(server, timeout_s=0.2).look_up()


def test_a_nameserver_is_an_address_and_perhaps_a_port() -> None:
    good = {
        "10.0.0.10": ("10.0.0.10", 53),
        "127.0.0.1:5300": ("127.0.0.1", 5300),
        "fd00::a": ("fd00::a", 53),
        "[fd00::a]:5300": ("fd00::a", 5300),
    }
    assert {text: address_of(text) for text in good} == good
    for bad in ("dns.example", "10.0.0.10:", "10.0.0.10:x", "", "::1::"):
        with pytest.raises(ValueError, match=r"nameservers"):
            DiscoveryConfig(nameservers=(bad,))


async def test_a_scaled_service_is_followed_without_a_restart(fleet: Callable[..., Any]) -> None:
    one, two = ScriptedReplica("replica-0", ("tuned",)), ScriptedReplica("replica-1", ("late",))
    async with DnsServer() as server, started(one, two):
        server.pods = {"replica-0": ("127.0.0.1", one.port)}
        async with fleet(discovery=found_by(server)) as it:
            await until(lambda: up(it) == {"replica-0"})
            assert (await it.chat("tuned")).headers["x-loraplex-replica"] == "replica-0"
            assert (await it.chat("late")).status_code == 404

            server.pods["replica-1"] = ("127.0.0.1", two.port)  # scaled up
            await until(lambda: up(it) == {"replica-0", "replica-1"})
            assert (await it.chat("late")).headers["x-loraplex-replica"] == "replica-1"

            two.draining = True  # scaled down: it drains, goes, and is named no more
            await until(lambda: up(it) == {"replica-0"})
            del server.pods["replica-1"]
            await two.stop()
            await until(lambda: members(it) == {"replica-0"})
            assert (await it.chat("late")).status_code == 404
            assert await count(it, 'members_total{change="left"}') == 1
            assert await count(it, 'replicas{state="lost"}') == 0

            two.draining = False  # and up again, under its name
            two.reboot()
            await two.start()
            server.pods["replica-1"] = ("127.0.0.1", two.port)
            await until(lambda: up(it) == {"replica-0", "replica-1"})
            assert (await it.chat("late")).status_code == 200


async def test_no_answer_of_dns_takes_out_a_replica_that_reports(
    fleet: Callable[..., Any],
) -> None:
    one = ScriptedReplica("replica-0", ("tuned",))
    async with DnsServer() as server, started(one):
        server.pods = {"replica-0": ("127.0.0.1", one.port)}
        async with fleet(discovery={**found_by(server), "forget_s": 0.3}) as it:
            await until(lambda: up(it) == {"replica-0"})
            server.pods = {"replica-0": ("127.0.0.9", 1)}  # a wrong address, then nobody
            await until(lambda: len(server.asked) > 15)
            server.pods = {}
            asked = len(server.asked)
            await until(lambda: len(server.asked) > asked + 15)  # longer than forget_s
            assert (await it.chat("tuned")).status_code == 200
            server.silent = True
            assert (await it.chat("tuned")).status_code == 200
            await one.stop()  # silent and unnamed: now it may be forgotten
            server.silent = False
            await until(lambda: members(it) == set())


async def test_a_pod_that_comes_back_elsewhere_is_followed_and_moves_nothing(
    fleet: Callable[..., Any],
) -> None:
    before, after = (
        ScriptedReplica("replica-0", ("tuned",)),
        ScriptedReplica("replica-0", ("tuned",)),
    )
    async with DnsServer() as server, started(before, after):
        server.pods = {"replica-0": ("127.0.0.1", before.port)}
        async with fleet(discovery=found_by(server)) as it:
            await until(lambda: up(it) == {"replica-0"})
            await before.stop()
            server.pods = {"replica-0": ("127.0.0.1", after.port)}
            boot = after.report().boot
            await until(lambda: boots(it) == {"replica-0": boot})
            assert (await it.chat("tuned")).status_code == 200
            assert len(after.received) == 1
            assert await count(it, 'members_total{change="moved"}') == 1


async def test_a_stream_that_runs_at_one_that_leaves_is_finished(fleet: Callable[..., Any]) -> None:
    one = ScriptedReplica("replica-0", ("tuned",))
    async with DnsServer() as server, started(one):
        server.pods = {"replica-0": ("127.0.0.1", one.port)}
        async with fleet(discovery={**found_by(server), "forget_s": 0}) as it:
            await until(lambda: up(it) == {"replica-0"})
            left = asyncio.Event()
            one.answer = chatters(one, left)
            async with it.http.stream(
                "POST",
                "/v1/completions",
                json={"model": "tuned", "prompt": "a", "stream": True},
            ) as reply:
                one.reporting = False  # its reports stop, and DNS has forgotten it
                server.pods = {}
                await until(lambda: members(it) == set())
                left.set()
                assert (await reply.aread()).endswith(b"data: [DONE]\n\n")


async def test_a_fleet_is_no_larger_than_it_may_be(fleet: Callable[..., Any]) -> None:
    one = ScriptedReplica("replica-0")
    async with DnsServer() as server:
        server.pods = {f"pod-{n}": ("127.0.0.1", 1) for n in range(3)}
        config = {**found_by(server), "members_max": 2}
        async with fleet(one, discovery=config) as it:
            await until(lambda: len(members(it)) == 2)
            assert await count(it, "replicas_not_taken") == 1
            rows = (await it.http.get("/readyz")).json()["replicas"]
            assert {row["id"] for row in rows} == {"replica-0", "pod-0"}
