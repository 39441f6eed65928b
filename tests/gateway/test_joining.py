"""Replicas that announce themselves with the fleet token, through any gateway, to all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from scripted import ScriptedReplica, second, started, until

from shared.wire import FLEET_TOKEN, JOIN_PATH

TOKEN = "fleet-token-of-tests"
ADMIN = "admin-key-of-tests"


@asynccontextmanager
async def joinable(
    fleet: Callable[..., Any], *replicas: Any, **discovery: Any
) -> AsyncIterator[Any]:
    sections = {"fleet": {"token": TOKEN}, "admin": {"key": ADMIN}, "discovery": discovery}
    async with fleet(*replicas, **sections) as it:
        yield it


async def joins(it: Any, token: str = TOKEN, **entry: Any) -> httpx.Response:
    return await it.http.post(JOIN_PATH, json=entry, headers={FLEET_TOKEN: token})


def members(gateway: Any) -> dict[str, str]:
    return {view.replica: view.state for view in gateway.pump.dispatcher.view(0.0)}


async def test_a_replica_joins_one_gateway_and_every_gateway_sends_requests_there(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    one = ScriptedReplica("gpu-7", ("tuned",), token=TOKEN)
    async with (
        started(one),
        joinable(fleet) as it,
        second(it, tmp_path, token=TOKEN) as other,
    ):
        reply = await joins(it, id="gpu-7", url=one.url)
        assert (reply.status_code, reply.json()["lease_s"]) == (200, 15)
        await until(lambda: members(it.gateway) == members(other) == {"gpu-7": "up"})
        assert (await it.chat("tuned")).headers["x-loraplex-replica"] == "gpu-7"
        rows = await it.http.get("/admin/v1/replicas", headers={"authorization": f"Bearer {ADMIN}"})
        assert [row["found_by"] for row in rows.json()["data"]] == ["join"]


async def test_a_lease_that_ends_takes_out_nobody_who_reports_and_then_the_silent(
    fleet: Callable[..., Any],
) -> None:
    one = ScriptedReplica("gpu-7", token=TOKEN)
    async with started(one), joinable(fleet, lease_s=1, forget_s=0) as it:
        await joins(it, id="gpu-7", url=one.url)
        await until(lambda: members(it.gateway) == {"gpu-7": "up"})
        found_by = it.gateway.members.found_by
        await until(lambda: found_by("gpu-7") == "")  # not renewed
        await asyncio.sleep(0.2)
        assert members(it.gateway) == {"gpu-7": "up"}
        await one.stop()
        await until(lambda: members(it.gateway) == {})


async def test_a_name_is_one_address_as_long_as_its_lease_runs(fleet: Callable[..., Any]) -> None:
    listed = ScriptedReplica("replica-0", token=TOKEN)
    async with joinable(fleet, listed, lease_s=1, members_max=2) as it:
        assert (await joins(it, id="a", url="http://10.0.0.1:1")).status_code == 200
        assert (await joins(it, id="a", url="http://10.0.0.1:1")).status_code == 200  # renewed
        taken = await joins(it, id="a", url="http://10.0.0.2:1")
        assert taken.status_code == 409
        assert "http://10.0.0.1:1's for another 1 s" in taken.json()["error"]["message"]
        assert (await joins(it, id="replica-0", url="http://10.0.0.2:1")).status_code == 409
        assert (await joins(it, id="b", url="http://10.0.0.3:1")).status_code == 200
        full = await joins(it, id="c", url="http://10.0.0.4:1")
        assert "discovery.members_max" in full.json()["error"]["message"]
        # it gives its place up, but only to whoever knows its address
        gone = {FLEET_TOKEN: TOKEN}
        for url, then in (("http://10.0.0.9:1", 409), ("http://10.0.0.1:1", 200)):
            left = await it.http.delete(f"{JOIN_PATH}/a", params={"url": url}, headers=gone)
            assert left.status_code == 204
            assert (await joins(it, id="a", url="http://10.0.0.2:1")).status_code == then


async def events(it: Any) -> list[tuple[str, str, str, dict[str, str]]]:
    """Action, subject, actor and detail of those about replicas, oldest first."""
    found = await it.http.get("/admin/v1/events", headers={"authorization": f"Bearer {ADMIN}"})
    return [
        (one["action"], one["subject"], one["actor"], one["detail"])
        for one in reversed(found.json()["data"])
        if one["action"].startswith("replica.")
    ]


async def test_each_change_of_who_joined_is_one_event_and_a_renewal_is_none(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    async with (
        joinable(fleet, members_max=2, lease_s=3) as it,
        second(it, tmp_path, token=TOKEN) as other,
    ):
        here, there = "http://10.0.0.1:1", "http://10.0.0.2:1"
        for _ in range(3):
            assert (await joins(it, id="a", url=here)).status_code == 200
        assert (await joins(it, id="a", url=there)).status_code == 409  # refused: no event
        assert (await joins(it, id="a", url=here, kind="vllm")).status_code == 200
        for url in (there, here, here):  # not its own; it leaves; it has left
            path = f"{JOIN_PATH}/a"
            left = await it.http.delete(path, params={"url": url}, headers={FLEET_TOKEN: TOKEN})
            assert left.status_code == 204
        assert (await joins(it, id="b", url=there, base="tiny")).status_code == 200
        for found_by in ("join", ""):  # both see it come, and its lease end
            for its in (it.gateway.members, other.members):
                await until(lambda its=its, by=found_by: its.found_by("b") == by)
        for gateway in (it.gateway, other):
            await gateway.members.joining.look()
        fleet_token, nobody = "fleet  from 127.0.0.1", "gateway"
        assert await events(it) == [
            ("replica.joined", "a", fleet_token, {"url": here, "kind": "native", "base": ""}),
            ("replica.joined", "a", fleet_token, {"url": here, "kind": "vllm", "base": ""}),
            ("replica.left", "a", fleet_token, {"url": here}),
            ("replica.joined", "b", fleet_token, {"url": there, "kind": "native", "base": "tiny"}),
            ("replica.expired", "b", nobody, {"why": "lease not renewed"}),
        ]


async def test_who_says_so_again_after_its_lease_ended_is_not_forgotten(
    fleet: Callable[..., Any],
) -> None:
    """The list is looked at, and while somebody decides to forget, the replica is back."""
    async with joinable(fleet) as it:
        await joins(it, id="a", url="http://10.0.0.1:1")
        assert await it.gateway.store.change("expire", ["joined", "events"], ["a", b"{}", 9]) == 0
        assert [action for action, *_ in await events(it)] == ["replica.joined"]


async def test_what_a_newer_gateway_wrote_is_passed_over(fleet: Callable[..., Any]) -> None:
    async with joinable(fleet) as it:
        for name, entry in (("a", '{"id": "a", "hue": 1}'), ("b", '{"id": "b", "url": "b"}')):
            words = [name, "http://10.0.0.1:1", entry, 9_000_000, 9, b"{}", 9]
            assert await it.gateway.store.change("join", ["joined", "any"], words) == ""
        await joins(it, id="c", url="http://10.0.0.3:1")
        await until(lambda: members(it.gateway) == {"c": "unknown"})


async def test_without_the_token_nobody_joins(fleet: Callable[..., Any]) -> None:
    async with joinable(fleet) as it:
        for token in ("", "wrong", ADMIN):
            reply = await joins(it, token, id="a", url="http://10.0.0.1:1")
            assert reply.status_code == 401
            assert FLEET_TOKEN in reply.json()["error"]["message"]
        assert members(it.gateway) == {}
    async with fleet() as it:
        assert (
            "fleet.token" in (await joins(it, id="a", url="http://h:1")).json()["error"]["message"]
        )


async def test_what_is_no_entry_is_refused_by_the_field(fleet: Callable[..., Any]) -> None:
    async with joinable(fleet) as it:
        for entry, param in (
            ({"url": "http://h:1"}, "id"),
            ({"id": "a b", "url": "http://h:1"}, "id"),
            ({"id": "a/b", "url": "http://h:1"}, "id"),
            ({"id": "a", "url": "h:1"}, "url"),
            ({"id": "a", "url": "http://h:1/ x"}, "url"),
            ({"id": "a", "url": "http://me:secret@h:1"}, "url"),
            ({"id": "a", "url": "http://h:1", "slots": "4"}, "slots"),
            ({"id": "a", "url": "http://h:1", "kind": "x"}, "kind"),
            ({"id": "a", "url": "http://h:1", "color": "x"}, "color"),
            ({"id": "a", "url": "http://h:1", "kind": "vllm", "api_key": "k"}, "api_key"),
        ):
            reply = await joins(it, **entry)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), entry


@contextmanager
def real_replica(folder: Path, gateway: str) -> Iterator[subprocess.Popen[str]]:
    """A tiny base, in a process of its own, that joins."""
    from replica.engine.tiny import tiny_adapter, tiny_model

    config = tiny_model(folder / "base", context=256)
    tiny_adapter(folder / "adapters" / "tuned", config, seed=1)
    command = [sys.executable, "-m", "replica", "--base", str(folder / "base")]
    command += ["--adapters", str(folder / "adapters"), "--name", "outside-1", "--threads", "1"]
    with subprocess.Popen(
        [*command, "--join", gateway],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LORAPLEX_FLEET_TOKEN": TOKEN},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_real_replica_joins_serves_and_leaves(
    fleet: Callable[..., Any], tmp_path: Path
) -> None:
    async with joinable(fleet) as it:
        with real_replica(tmp_path, it.url) as process:
            await until(lambda: members(it.gateway) == {"outside-1": "up"}, within_s=90)
            await until(lambda: it.gateway.pump.dispatcher.knows("tuned"), within_s=20)
            reply = await it.http.post(
                "/v1/completions", json={"model": "tuned", "prompt": "a", "max_tokens": 2}
            )
            assert reply.headers["x-loraplex-replica"] == "outside-1"
            process.send_signal(signal.SIGTERM)
            await until(lambda: members(it.gateway) == {}, within_s=10)  # not after forget_s
            assert await asyncio.to_thread(process.wait, 30) == 0
