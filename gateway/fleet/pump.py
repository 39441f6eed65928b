"""The Dispatcher, driven by asyncio: events in at once, decisions out to whoever waits.

Law: every event is followed by one `poll` with no `await` between; every arrival ends in exactly
one `finish` or `cancel`, whatever happens to its request, because a `Lease` has one exit. Time
passes by one timer, set to the dispatcher's own `next_wakeup`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from gateway.core.dispatcher import (
    Arrival,
    Conduct,
    Decision,
    Dispatch,
    Dispatcher,
    Order,
    Placement,
    RejectReason,
    Verdict,
)
from gateway.fleet.names import is_version
from shared.clock import Clock, monotonic
from shared.ids import ReplicaId, RequestId
from shared.messages import ReplicaReport

_log = logging.getLogger(__name__)

_TICK_S: Final = 0.001  # a timer is not finer than this; waking early would spin


Waits = Callable[[], None]


def _unheard() -> None:
    """Nobody wants to know."""


class Refused(Exception):
    """The dispatcher said no: at arrival (`Reject`) or from the queue (`Evict`)."""

    def __init__(self, why: RejectReason) -> None:
        super().__init__(str(why))
        self.why = why


class Lease:
    """One request's place in the queue and then at a replica; `async with` gives it back."""

    def __init__(self, pump: Pump, arrival: Arrival, version: str, waits: Waits) -> None:
        self._pump = pump
        self._waits = waits
        self._arrival = arrival
        self._version = version
        self._placement: Placement | None = None
        self._refused: RejectReason | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._used: tuple[int | None, int | None] = (None, None)
        self.conduct: Conduct | None = None
        """How its replica behaved; told when the lease ends."""

    @property
    def placement(self) -> Placement:
        assert self._placement is not None, "the lease holds no place"
        return self._placement

    def settle(self, input_tokens: int | None, output_tokens: int | None) -> None:
        """What the request really cost; None keeps the estimate. Told when the lease ends."""
        self._used = (input_tokens, output_tokens)

    async def __aenter__(self) -> Self:
        self._pump.remember(self._arrival.request, self)
        if self._placement is None:
            self._placement = self._pump.place(self._arrival)
        if self._placement is None:
            self._pump.arrive(self._arrival)
        if self._placement is None or self._version:
            await self._placed_well()
        return self

    def answered(self) -> None:
        """Its first token has come (of a request that streams)."""
        self._pump.answered(self._arrival.request)

    async def retry(self, failed: ReplicaId, conduct: Conduct | None) -> Placement:
        """Wait again, first in line, for a replica other than those that failed.

        To one that is GONE nothing is sent until it reports again.
        """
        self._placement = None
        self._pump.reroute(self._arrival.request, failed, conduct)
        await self._placed_well()
        return self.placement

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            self._placement = decision.placement
        else:
            self._refused = decision.why
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _placed_well(self) -> None:
        """Where another version of the adapter is held, the request does not stay."""
        await self._placed()
        while self._version and not is_version(self.placement.digest, self._version):
            other, self._placement = self.placement.replica, None
            self._pump.reroute(self._arrival.request, other, None)
            await self._placed()

    async def _placed(self) -> None:
        if self._placement is None and self._refused is None:
            self._waiter = asyncio.get_running_loop().create_future()
            self._waits()
            try:
                await self._waiter
            except BaseException:  # the client left, or the gateway stops
                self._used = (0, 0)
                self._close()
                raise
            finally:
                self._waiter = None
        if self._refused is not None:
            self._pump.forget(self._arrival.request)  # the dispatcher has ended it
            raise Refused(self._refused)

    def _close(self) -> None:
        """Idempotent: a wait that was cancelled has closed before `async with` does."""
        if self._pump.forget(self._arrival.request):
            self._pump.end(self._arrival.request, self._placement, self._used, self.conduct)


class Pump:
    """The one owner of the Dispatcher in a running gateway."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        clock: Clock = monotonic,
        observe: Callable[[Decision], None] = lambda decision: None,
        judged: Callable[[Verdict], None] = lambda verdict: None,
        carry_out: Callable[[Order], None] = lambda order: None,
    ) -> None:
        self.dispatcher: Final = dispatcher
        self.clock: Final = clock
        self._observe = observe
        self._judged = judged
        self._carry_out = carry_out
        self._leases: dict[RequestId, Lease] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def lease(self, arrival: Arrival, *, version: str = "", waits: Waits = _unheard) -> Lease:
        """`version`: how the digest of the adapter must begin where the request is placed.
        `waits` is called when it has to wait."""
        return Lease(self, arrival, version, waits)

    def place(self, arrival: Arrival) -> Placement | None:
        """A place at once, to be given back by `end`, or by the Lease that `held` makes of it.
        None: nothing has happened, and it takes a Lease."""
        dispatch = self.dispatcher.place(arrival, self.clock())
        if dispatch is None:
            return None
        self._observe(dispatch)
        return dispatch.placement

    def held(self, arrival: Arrival, placement: Placement, version: str) -> Lease:
        """Of what `place` gave; enter it."""
        lease = Lease(self, arrival, version, _unheard)
        lease.decided(Dispatch(arrival.request, placement))
        return lease

    def replica_added(self, replica: ReplicaId) -> None:
        self.dispatcher.replica_added(replica, self.clock())
        self.wake()

    def replica_removed(self, replica: ReplicaId) -> None:
        """Its requests in flight may still end."""
        self.dispatcher.replica_removed(replica, self.clock())
        self.wake()

    def report(self, report: ReplicaReport) -> bool:
        """False when it told nothing new."""
        news = self.dispatcher.report(report, self.clock())
        if news:
            self.wake()
        return news

    def replica_lost(self, replica: ReplicaId) -> None:
        """Its next report brings it back."""
        self.dispatcher.replica_lost(replica, self.clock())
        self.wake()

    def arrive(self, arrival: Arrival) -> None:
        self.dispatcher.arrive(arrival, self.clock())
        self.wake()

    def remember(self, request: RequestId, lease: Lease) -> None:
        self._leases[request] = lease

    def reroute(self, request: RequestId, failed: ReplicaId, conduct: Conduct | None) -> None:
        self.dispatcher.reroute(request, failed, self.clock(), conduct=conduct)
        self.wake()

    def answered(self, request: RequestId) -> None:
        if self.dispatcher.answered(request, self.clock()):
            self.wake()

    def forget(self, request: RequestId) -> bool:
        return self._leases.pop(request, None) is not None

    def end(
        self,
        request: RequestId,
        placement: Placement | None,
        used: tuple[int | None, int | None],
        conduct: Conduct | None,
    ) -> None:
        if placement is None:
            self.dispatcher.cancel(request, self.clock())
        else:
            self.dispatcher.finish(request, *used, self.clock(), conduct)
        if not self.dispatcher.quiet:
            self.wake()

    def wake(self) -> None:
        """Take the decisions that are due; call it after changing the dispatcher otherwise."""
        now = self.clock()
        for decision in self.dispatcher.poll(now):
            self._observe(decision)
            self._leases[decision.request].decided(decision)
        while self.dispatcher.verdicts:
            verdict = self.dispatcher.verdicts.pop(0)
            told = {"replica": verdict.replica, "why": verdict.why}
            _log.warning("replica %s", verdict.standing, extra=told)
            self._judged(verdict)
        for order in self.dispatcher.orders(now):
            self._carry_out(order)
        self._arm(now)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, now: float) -> None:
        due = self.dispatcher.next_wakeup(now)
        if self._timer is not None:
            if due is not None and self._timer_at <= due:
                return  # it fires early at worst, and then arms the right one
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer_at = due
            loop = asyncio.get_running_loop()
            ahead_s = loop.time() - now  # of our clock; a moment, unlike a delay, is not rounded
            self._timer = loop.call_at(ahead_s + max(due, now + _TICK_S), self._fired)

    def _fired(self) -> None:
        self._timer = None
        self.wake()
