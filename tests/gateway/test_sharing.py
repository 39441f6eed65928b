"""What a gateway's tenants have running is heard by the others, through a real store."""

from __future__ import annotations

import asyncio
from typing import Any

from scripted import ScriptedReplica, until

from gateway.sharing import Sharing


async def test_what_a_gateway_has_running_is_heard_by_another(fleet: Any) -> None:
    one = ScriptedReplica("replica-0")
    async with fleet(one) as it:
        dispatcher = it.gateway.pump.dispatcher
        heard: dict[str, float] = {}
        dispatcher.served_elsewhere = lambda tenant, served, running: heard.update(
            {tenant: running}
        )
        one.answer = one.freezes
        asked = asyncio.ensure_future(it.chat())
        await until(lambda: dispatcher.in_flight == 1)
        await Sharing(it.gateway.store, dispatcher).exchange()
        await Sharing(it.gateway.store, dispatcher).exchange()
        assert heard["acme"] > 0
        asked.cancel()
