"""The fast path of a completion: no task and no wait, for one that nothing holds up.

Why it exists: a task, the futures it waits for and the coroutines that it wakes through cost as
much as all our features. But most requests wait for nothing of ours: their quota was reserved
ahead, nobody is before them in the queue, a replica has room and a connection to it is open. Such
a one is a few calls: inside the read that brought it, it is checked, placed and sent on; inside
the read that ends the reply, it is counted and entered in the bill.

The checks, their order and what is taken are the long way's (gateway/handlers.py), by the same
objects. Whatever is not quite so goes there: `begin` has then taken nothing, and what does not end
well goes on as a task, which holds the same place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

from gateway.auth import Door
from gateway.connection import Connection
from gateway.core.dispatcher import Arrival, Placement
from gateway.errand import Errand, Prices, Settlement
from gateway.errors import GatewayError, ShuttingDown
from gateway.exchange import UpstreamError
from gateway.forward import Forwarder
from gateway.front import Call, Plain
from gateway.idempotency import HEADER as IDEMPOTENCY_KEY
from gateway.names import is_version
from gateway.pump import Lease, Pump
from gateway.quota import Quota
from gateway.relay import Relay
from gateway.reply import Reply
from gateway.running import Running
from gateway.tenants import Tenant
from shared.ids import RequestId
from shared.messages import Usage
from shared.wire import REQUEST_ID

CLIENT_REQUEST_ID: Final = "x-client-request-id"
_LONG: Final = (IDEMPOTENCY_KEY.lower(), CLIENT_REQUEST_ID)  # they ask for more than a moment

GoneOn = Callable[[Errand, Lease, Exception | None], Coroutine[Any, Any, None]]
"""Goes on with an errand that holds a place; its first attempt may have failed."""


class ShortWay:
    def __init__(
        self,
        *,
        door: Door,
        quota: Quota,
        prices: Prices,
        pump: Pump,
        forwarder: Forwarder,
        settlement: Settlement,
        running: Running,
        keepalive_s: float,
        named: Callable[[], RequestId],
        understood: Callable[[Tenant, Call, bytes, Reply, RequestId], Errand],
        gone_on: GoneOn,
        tell: Callable[[Reply, GatewayError], None],
    ) -> None:
        self.door = door
        self.quota = quota
        self.prices = prices
        self.pump = pump
        self.forwarder = forwarder
        self.settlement = settlement
        self.running = running
        self.keepalive_s = keepalive_s
        self.named = named
        self.understood = understood
        self.gone_on = gone_on
        self.tell = tell

    def begin(self, call: Plain, reply: Reply, over: Callable[[], None]) -> Passage | None:
        """`over` is called when the reply is out. None: nothing has happened, go the long way."""
        header = call.header
        if self.running.draining or header(_LONG[0]) is not None or header(_LONG[1]) is not None:
            return None
        request = self.named()
        try:
            tenant = self.door.admit(header, reply.peer)
            errand = self.understood(tenant, call, call.body, reply, request)
        except Exception:  # it comes again on the long way, and is told there
            return None
        ask, name = errand.ask, errand.target.name
        if name != ask.model:
            return None
        likely = Usage(ask.input_tokens, ask.output_tokens)
        granted = self.quota.take(
            tenant,
            request,
            likely.total_tokens,
            output_tokens=ask.output_tokens,
            spend=self.prices(tenant.id, name).of(likely),
            model=name,
        )
        if granted is None:
            return None
        arrival = errand.arrival
        placement = self.pump.place(arrival)
        if placement is None:
            self.quota.put_back(granted)
            return None
        errand.granted = granted
        reply.headers[REQUEST_ID] = request
        reply.lines = granted.headers
        if ask.stream:
            reply.keep_awake(self.keepalive_s)
        passage = Passage(self, errand, arrival, over)
        self.running.add(passage)
        passage.begin(placement)
        return passage


class Passage:
    """One completion on the short way, or on the long way that it went on by."""

    __slots__ = ("_arrival", "_connection", "_errand", "_over", "_relay", "_task", "_way")

    def __init__(
        self, way: ShortWay, errand: Errand, arrival: Arrival, over: Callable[[], None]
    ) -> None:
        self._way = way
        self._errand = errand
        self._arrival = arrival
        self._over = over
        self._relay: Relay
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, placement: Placement) -> None:
        version = self._errand.target.version
        if version and not is_version(placement.digest, version):
            self._errand.placed(placement)
            return self._go_on(None)
        forwarder = self._way.forwarder
        forwarder.saw()
        upstream, request, self._relay, limits = forwarder.begin(
            self._errand, placement, self._answered
        )
        self._connection = upstream.start(
            request,
            self._relay,
            first_byte_s=limits.first_byte_s,
            idle_s=limits.idle_s,
            ended=self._ended,
        )
        if self._connection is None:
            self._go_on(None)

    def cancel(self) -> None:
        """The client has left, or the gateway ends what runs."""
        if self._task is not None:
            self._task.cancel()
        elif self._connection is not None:
            self._connection.drop()
            self._connection = None
            way, errand = self._way, self._errand
            way.forwarder.dropped(errand, self._relay)
            if not errand.reply.ended:
                errand.outcome = "failed" if way.running.ending else "cut"
                if way.running.ending:
                    way.tell(errand.reply, ShuttingDown())
            self._close()

    def _answered(self) -> None:
        self._way.pump.answered(self._errand.request)

    def _ended(self, failure: UpstreamError | None) -> None:
        self._connection = None
        if failure is not None and failure.stale:
            return self._go_on(None)
        try:
            self._way.forwarder.ended(self._errand, self._relay, failure)
        except Exception as error:
            self._go_on(error)
        else:
            self._close()

    def _close(self) -> None:
        errand, usage = self._errand, self._errand.usage
        used = (usage.prompt_tokens, usage.completion_tokens)
        self._way.pump.end(errand.request, errand.placement, used, errand.conduct)
        self._way.settlement.soon(errand, self._recorded)

    def _recorded(self) -> None:
        """The bill is on disk: the client may have its last bytes."""
        reply = self._errand.reply
        reply.let_go()
        reply.close()
        self._way.running.remove(self)
        self._over()

    def _go_on(self, error: Exception | None) -> None:
        """As a task, at the same place: with a new connection, or after this failure."""
        way, errand = self._way, self._errand
        assert errand.placement is not None
        lease = way.pump.held(self._arrival, errand.placement, errand.target.version)
        # Not `spawn`: the reference is here, and `gone_on` tells of every crash itself.
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(way.gone_on(errand, lease, error))
        way.running.add(self._task)
        way.running.remove(self)
        self._task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # only that the client has left, which we know
        self._over()
