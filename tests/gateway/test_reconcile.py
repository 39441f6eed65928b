"""The bill against the replicas' own counters: equal when it is right, and every fault is found."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from scripted import WORDS, ScriptedReplica, chunks, until

from gateway.state.ledger import Record
from shared.clock import wall
from shared.ids import ReplicaId, RequestId, TenantId

ADMIN = "operators-only-0123456789"


class Counting(ScriptedReplica):
    """Counts what its sequences were given, as a replica does."""

    generated = 0

    async def well(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = await super().well(request, body)
        self.generated += len(WORDS)
        return answer

    async def cut_short(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Says three words of its stream, and then waits for its client to leave."""
        response = await self.begin(request)
        for event in chunks(body["model"])[:4]:
            await response.write(event)
        self.generated += 3
        await asyncio.Event().wait()
        return response


def counting() -> Counting:
    one = Counting("replica-0")

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:generation_tokens_total{{model="tiny"}} {float(one.generated)}\n'
        )

    one.more = [web.get("/metrics", metrics)]
    return one


async def reconciled(it: Any) -> dict[str, Any]:
    await until(lambda: it.gateway.ledger.backlog_bytes == 0)
    answer = await it.http.get(
        "/admin/v1/usage/reconcile", headers={"authorization": f"Bearer {ADMIN}"}
    )
    [row] = answer.json()["data"]
    return dict(row)


async def test_a_bill_that_is_right_is_equal(fleet: Any) -> None:
    async with fleet(counting(), admin={"key": ADMIN}) as it:
        for n in range(6):
            assert (await it.chat(stream=bool(n % 2))).status_code == 200
        row = await reconciled(it)
        assert (row["verdict"], row["generated"], row["billed"]) == ("equal", 24, 24)
        assert row["counted_requests"] == 6


@pytest.mark.parametrize("more", ["generated", "billed"])
async def test_an_injected_difference_is_found(fleet: Any, more: str) -> None:
    one = counting()
    async with fleet(one, admin={"key": ADMIN}) as it:
        await it.chat()
        if more == "generated":
            one.generated += 5  # somebody calls the replica past the gateway
        else:
            it.gateway.ledger.record(forged(one))
        row = await reconciled(it)
        assert row["verdict"] == "differs"
        assert row["difference"] == (5 if more == "generated" else -5)


async def test_a_client_that_left_explains_what_it_was_not_told(fleet: Any) -> None:
    one = counting()
    async with fleet(one, admin={"key": ADMIN}) as it:
        one.answer = one.cut_short
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with it.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            async for _ in reply.aiter_lines():
                break
        await until(lambda: one.left)
        one.answer = None
        await it.chat()
        row = await reconciled(it)
        assert row["estimated_requests"] == 1
        assert row["verdict"] in ("equal", "explained")
        assert abs(row["difference"]) <= 2


async def test_a_replica_that_counts_nothing_is_unknown_and_says_so(fleet: Any) -> None:
    async with fleet(ScriptedReplica("replica-0"), admin={"key": ADMIN}) as it:
        row = await reconciled(it)
        assert row["verdict"] == "unknown"
        assert "metrics" in row["reason"]


async def test_a_restarted_replica_is_reconciled_from_nothing(fleet: Any) -> None:
    one = counting()
    async with fleet(one, admin={"key": ADMIN}) as it:
        await it.chat()
        boot = (await reconciled(it))["boot"]
        one.reboot()
        one.generated = 0
        views = it.gateway.pump.dispatcher.view
        await until(lambda: views(it.gateway.pump.clock())[0].boot != boot)
        await it.chat()
        row = await reconciled(it)
        assert (row["verdict"], row["billed"]) == ("equal", 4)


def forged(one: ScriptedReplica) -> Record:
    return Record(
        request=RequestId("forged"),
        tenant=TenantId("acme"),
        adapter="tiny",
        digest="",
        replica=ReplicaId(one.name),
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=5,
        queue_s=0.0,
        first_token_s=0.0,
        total_s=0.0,
        outcome="ok",
        estimated=False,
        at=wall(),
        boot=one._boot,
    )
