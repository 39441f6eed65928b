"""One completion on its way: what was asked, where it was sent, and what it came to.

The same object from the door to the bill, filled in as the request goes, so that the bill is right
however it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.completion.ask import Ask
from gateway.completion.journal import Journal
from gateway.completion.stages import UNTRACED, Traced
from gateway.core.cost import estimate_tokens
from gateway.core.dispatcher import Arrival, Conduct, Placement
from gateway.edge.relay import Relay
from gateway.edge.reply import Reply
from gateway.fleet.names import Target
from gateway.metrics import Metrics
from gateway.state.ledger import Ledger, Outcome, Record
from gateway.state.prices import Price
from gateway.state.quota import Granted, Quota
from gateway.state.tenants import Tenant
from shared.clock import Clock, monotonic, wall
from shared.ids import ReplicaId, RequestId, TenantId
from shared.messages import Usage

_NOTHING: Final = Usage()

Prices = Callable[[TenantId, str], Price]
"""Of a tenant's requests for a model, now."""


@dataclass(slots=True, eq=False)
class Errand:
    request: RequestId
    tenant: Tenant
    ask: Ask
    target: Target
    reply: Reply
    arrived_at: float
    path: str
    passed: bytes  # the client's header lines that go on to the replica
    granted: Granted | None = None
    placement: Placement | None = None  # the last one
    conduct: Conduct | None = None  # how that replica behaved
    outcome: Outcome = "failed"
    replica: ReplicaId | None = None
    boot: str = ""
    digest: str = ""
    queue_s: float = 0.0
    first_token_s: float | None = None
    usage: Usage = _NOTHING
    estimated: bool = False
    traced: Traced = UNTRACED
    why: str = ""  # the reason of the error that ended it

    @property
    def arrival(self) -> Arrival:
        ask, tenant = self.ask, self.tenant
        return Arrival(
            self.request,
            tenant.id,
            tenant.weight,
            self.target.adapter,
            ask.input_tokens,
            ask.output_tokens,
            None,
            ask.stream,
            "" if self.target.adapter is not None else self.target.name,
        )

    def placed(self, placement: Placement) -> None:
        self.placement = placement
        self.outcome = "failed"
        choice = placement.choice
        self.replica, self.digest = choice.replica, choice.digest
        self.boot, self.queue_s = placement.boot, placement.queue_s

    def count(self, relay: Relay) -> None:
        """By the replica's own count, else by the events that passed."""
        if relay.first_at is not None:
            self.first_token_s = relay.first_at - self.arrived_at
        if relay.usage is not None:
            self.usage = relay.usage
        elif relay.data_events:
            self.estimate(self.ask.input_tokens, relay.data_events)

    def count_whole(self, usage: Usage | None, size: int, now: float) -> None:
        """Of a reply that was not streamed, of so many bytes."""
        self.first_token_s = now - self.arrived_at
        if usage is not None:
            self.usage = usage
        else:
            self.estimate(self.ask.input_tokens, estimate_tokens(size))

    def estimate(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.usage = Usage(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        self.estimated = True


class Settlement:
    """What every errand ends in: quota, metrics and the bill."""

    def __init__(
        self,
        *,
        quota: Quota,
        prices: Prices,
        ledger: Ledger,
        metrics: Metrics,
        journal: Journal,
        clock: Clock = monotonic,
    ) -> None:
        self._quota = quota
        self._journal = journal
        self._prices = prices
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock

    def enter(self, errand: Errand) -> None:
        """Its record is on disk after the next `write`."""
        record = self._record(errand)
        self._ledger.record(record)
        kind = "" if errand.placement is None else errand.placement.kind
        self._journal.ended(record, errand.path, kind, errand.traced, errand.why)

    def write(self) -> None:
        self._ledger.spill()
        self._journal.write()

    def now(self, errand: Errand) -> None:
        self.enter(errand)
        self.write()

    def _record(self, errand: Errand) -> Record:
        usage, total_s = errand.usage, self._clock() - errand.arrived_at
        tenant, name = errand.tenant.id, errand.target.name
        spend = self._prices(tenant, name).of(usage)
        if errand.granted is not None:
            self._quota.settle(
                errand.granted.reservation,
                usage.total_tokens,
                output_tokens=usage.completion_tokens,
                spend=spend,
            )
        self._metrics.ended(
            tenant,
            name,
            errand.outcome,
            usage=usage,
            queue_s=errand.queue_s,
            first_token_s=errand.first_token_s,
            total_s=total_s,
        )
        return Record(
            errand.request,
            tenant,
            name,
            errand.digest,
            errand.replica or "",
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            errand.queue_s,
            errand.first_token_s or 0.0,
            total_s,
            errand.outcome,
            errand.estimated,
            wall(),
            spend,
            errand.boot,
        )
