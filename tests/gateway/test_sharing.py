"""Two gateways, one fleet: a tenant that asks at both gets no more than one that asks at one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
from scripted import BASE, ScriptedReplica, second, until

from gateway.fleet.sharing import EVERY_S

DEPTH = 8
TIME_S = 3.0


async def flood(url: str, key: str, done: list[int], until_s: float) -> None:
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=30) as http:
        while loop.time() < until_s:
            answer = await http.post(
                "/v1/chat/completions",
                json={"model": BASE, "messages": [{"role": "user", "content": "hi"}]},
                headers={"authorization": f"Bearer {key}"},
            )
            assert answer.status_code == 200, answer.text
            done.append(answer.json()["usage"]["completion_tokens"])


async def test_what_a_tenant_gets_at_one_gateway_counts_at_the_other(
    fleet: Any, tmp_path: Path
) -> None:
    """Alone, each gateway would give `a` half of the first and all of the second: 3 to 1."""
    one = ScriptedReplica("replica-0", capacity=2)
    one.answer = one.slow(0.05)
    async with fleet(one) as it, second(it, tmp_path) as two:
        keys = {}
        for name in ("a", "b"):
            await it.gateway.registry.create(name)
            _, keys[name] = await it.gateway.registry.key_create(name)
        await until(lambda: two.registry.tenant_for_key(keys["b"]))
        done: dict[str, list[int]] = {"a": [], "b": []}
        ends = asyncio.get_running_loop().time() + TIME_S
        asking = [("a", it.url), ("a", two.url), ("b", it.url)]
        await asyncio.gather(
            *[flood(url, keys[who], done[who], ends) for who, url in asking for _ in range(DEPTH)]
        )
        assert EVERY_S <= 0.25
        got = {who: len(replies) for who, replies in done.items()}
        assert got["a"] < 1.5 * got["b"], got
