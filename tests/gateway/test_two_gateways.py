"""Two gateways on one store are one limit: over HTTP, under simultaneous calls, again and again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from scripted import BASE, ScriptedReplica, second, until

from gateway.state.tenants import Limits

ROUNDS = 20
CALLS = 60
LIMIT = 10


async def test_sixty_calls_at_once_on_two_gateways_against_ten_a_minute(
    fleet: Any, tmp_path: Path
) -> None:
    """Exactly ten pass, each refusal says when to come back, and who comes back then passes."""
    async with fleet(ScriptedReplica("replica-0", capacity=64)) as it, second(it, tmp_path) as two:
        registry = it.gateway.registry
        names = [f"tenant-{n}" for n in range(ROUNDS)]
        keys = {}
        for name in names:
            await registry.create(name, limits=Limits(requests_per_min=LIMIT))
            _, keys[name] = await registry.key_create(name)
        await until(lambda: two.registry.tenant_for_key(keys[names[-1]]))
        limits = httpx.Limits(max_connections=CALLS)
        async with httpx.AsyncClient(verify=False, timeout=30, limits=limits) as http:

            async def call(url: str, key: str) -> httpx.Response:
                return await http.post(
                    f"{url}/v1/chat/completions",
                    json={"model": BASE, "messages": [{"role": "user", "content": "hi"}]},
                    headers={"authorization": f"Bearer {key}"},
                )

            async def obeyed(name: str, refused: httpx.Response) -> httpx.Response:
                await asyncio.sleep(int(refused.headers["retry-after-ms"]) / 1000)
                return await call(two.url, keys[name])

            waiting = []
            for name in names:
                answers = await asyncio.gather(
                    *[call((it.url, two.url)[n % 2], keys[name]) for n in range(CALLS)]
                )
                assert sum(answer.status_code == 200 for answer in answers) == LIMIT
                refused = [answer for answer in answers if answer.status_code == 429]
                others = [a.text for a in answers if a.status_code not in (200, 429)]
                assert not others, str(others)
                for answer in refused:
                    assert 0 < int(answer.headers["retry-after"]) <= 60 / LIMIT
                    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
                waiting.append(asyncio.ensure_future(obeyed(name, refused[-1])))
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [
                200
            ] * ROUNDS
