"""One completion on the short way, step by step (completion/short_way.py); no step waits.

The checks, their order and what is taken are the long way's (completion/handlers.py), by the same
objects. What is not quite so goes there before it has taken anything; what does not end well goes
on as a task, which holds the same place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from gateway.completion.auth import Door
from gateway.completion.errand import Errand, Prices, Settlement
from gateway.completion.forward import Forwarder
from gateway.completion.journal import Journal
from gateway.completion.running import Cancellable, Running
from gateway.completion.stages import Traced
from gateway.core.dispatcher import Arrival, Placement
from gateway.edge.connection import Connection
from gateway.edge.exchange import UpstreamError
from gateway.edge.front import Call
from gateway.edge.plain import Plain
from gateway.edge.relay import Relay
from gateway.edge.reply import Reply
from gateway.errors import GatewayError, Internal, ShuttingDown
from gateway.fleet.names import is_version
from gateway.fleet.pump import Lease, Pump
from gateway.state.quota import Quota
from gateway.state.tenants import Tenant
from shared.ids import RequestId
from shared.messages import Usage
from shared.wire import REQUEST_ID

GoneOn = Callable[[Errand, Lease, Exception | None], Coroutine[Any, Any, None]]
"""Goes on with an errand that holds a place; its first attempt may have failed."""


@dataclass(frozen=True, slots=True)
class Means:
    """What every passage works with."""

    door: Door
    quota: Quota
    prices: Prices
    pump: Pump
    forwarder: Forwarder
    settlement: Settlement
    journal: Journal
    running: Running
    keepalive_s: float
    named: Callable[[], RequestId]
    understood: Callable[[Tenant, Call, bytes, Reply, RequestId, Traced], Errand]
    gone_on: GoneOn
    tell: Callable[[Reply, GatewayError], None]


class Passage:
    """One completion on the short way, or on the long way that it went on by."""

    __slots__ = (
        *("_arrival", "_call", "_connection", "_errand", "_failure", "_otherwise", "_over"),
        *("_placement", "_relay", "_reply", "_report", "_task", "_way"),
    )

    def __init__(
        self,
        way: Means,
        exchanged: Callable[[Passage], None],
        call: Plain,
        reply: Reply,
        over: Callable[[], None],
        otherwise: Callable[[], Cancellable],
    ) -> None:
        self._way = way
        self._report = exchanged
        self._call: Plain | None = call  # until it is understood
        self._reply = reply
        self._over = over
        self._otherwise = otherwise
        self._errand: Errand
        self._arrival: Arrival
        self._placement: Placement
        self._relay: Relay
        self._connection: Connection | None = None
        self._failure: UpstreamError | None = None
        self._task: Cancellable | None = None

    # The steps of a request: False, when it is on the long way ------------------------------------

    def understand(self) -> bool:
        call, reply, way = self._call, self._reply, self._way
        if call is None:  # its client has left meanwhile
            return False
        self._call = None
        request = reply.headers[REQUEST_ID] = way.named()
        traced = way.journal.begun(call.trace)
        try:
            tenant = way.door.admit(call.header, reply.peer)
            errand = way.understood(tenant, call, call.body, reply, request, traced)
        except GatewayError as error:  # nothing was taken
            way.journal.turned_away(request, call.path, traced, error.reason)
            way.tell(reply, error)
            self.let_go()
            return False
        self._errand = errand
        return errand.target.name == errand.ask.model or self._turn_off()

    def take(self) -> bool:
        errand, way = self._errand, self._way
        tenant, ask, name = errand.tenant, errand.ask, errand.target.name
        likely = Usage(ask.input_tokens, ask.output_tokens)
        errand.granted = way.quota.take(
            tenant,
            errand.request,
            likely.total_tokens,
            output_tokens=ask.output_tokens,
            spend=way.prices(tenant.id, name).of(likely),
            model=name,
        )
        if errand.granted is None:
            return self._turn_off()
        if errand.traced.stages is not None:
            errand.traced.stages.admitted(way.pump.clock())
        return True

    def place(self) -> bool:
        errand, pump = self._errand, self._way.pump
        granted = errand.granted
        assert granted is not None
        self._arrival = errand.arrival
        placement = pump.place(self._arrival)
        if placement is None:
            self._way.quota.put_back(granted)
            return self._turn_off()
        self._placement = placement
        self._reply.lines = granted.headers
        if errand.ask.stream:
            self._reply.keep_awake(self._way.keepalive_s)
        version = errand.target.version
        if version and not is_version(placement.digest, version):
            self._go_on(None)
            return False
        return True

    def send(self) -> None:
        forwarder = self._way.forwarder
        forwarder.saw()
        upstream, request, self._relay, limits = forwarder.begin(
            self._errand, self._placement, self._answered
        )
        self._connection = upstream.start(
            request,
            self._relay,
            first_byte_s=limits.first_byte_s,
            idle_s=limits.idle_s,
            ended=self._exchanged,
        )
        if self._connection is None:
            self._go_on(None)

    # The steps of a reply -------------------------------------------------------------------------

    def _answered(self) -> None:
        self._way.pump.answered(self._errand.request)

    def _exchanged(self, failure: UpstreamError | None) -> None:
        self._connection, self._failure = None, failure
        self._report(self)

    def answer(self) -> bool:
        failure = self._failure
        if failure is not None and failure.stale:
            self._go_on(None)
            return False
        try:
            self._way.forwarder.ended(self._errand, self._relay, failure)
        except Exception as error:
            self._go_on(error)
            return False
        return True

    def leave(self) -> None:
        del self._relay  # it refers to us: a circle would be left for the garbage collector
        errand, usage = self._errand, self._errand.usage
        used = (usage.prompt_tokens, usage.completion_tokens)
        self._way.pump.end(errand.request, self._placement, used, errand.conduct)

    def enter(self) -> None:
        self._way.settlement.enter(self._errand)

    def let_go(self) -> None:
        """The bill is on disk: the client may have its last bytes."""
        self._reply.let_go()
        self._reply.close()
        self._way.running.remove(self)
        self._over()

    # Whatever else happens ------------------------------------------------------------------------

    def cancel(self) -> None:
        """The client has left, or the gateway ends what runs."""
        way, ending = self._way, self._way.running.ending
        if self._task is not None:
            self._task.cancel()
        elif self._call is not None:
            self._call = None
            if ending:
                way.tell(self._reply, ShuttingDown())
            self.let_go()
        elif self._connection is not None:
            self._connection.drop()
            self._connection, errand = None, self._errand
            way.forwarder.dropped(errand, self._relay)
            if not errand.reply.ended:
                errand.outcome = "failed" if ending else "cut"
                if ending:
                    way.tell(errand.reply, ShuttingDown())
            self.leave()
            self.enter()
            way.settlement.write()
            self.let_go()

    def fail(self) -> None:
        """A step has raised what it never should: it ends here, and the others go on."""
        if not self._reply.ended:
            self._way.tell(self._reply, Internal())
        self.let_go()

    def _turn_off(self) -> bool:
        """Onto the long way, from its beginning."""
        self._reply.held = False
        self._task = task = self._otherwise()
        self._way.running.add(task)
        self._way.running.remove(self)
        return False

    def _go_on(self, error: Exception | None) -> None:
        """As a task, at the same place: with a new connection, or after this failure."""
        way, errand = self._way, self._errand
        lease = way.pump.held(self._arrival, self._placement, errand.target.version)
        # Not `spawn`: the reference is here, and `gone_on` tells of every crash itself.
        self._task = task = asyncio.get_running_loop().create_task(
            way.gone_on(errand, lease, error)
        )
        way.running.add(task)
        way.running.remove(self)
        task.add_done_callback(self._arrived)

    def _arrived(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # only that the client has left, which we know
        self._over()
