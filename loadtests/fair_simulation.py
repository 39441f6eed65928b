"""Fairness at scale, in virtual time: the production dispatcher under tenants that never let go.

A closed loop: every tenant keeps as many requests outstanding as its depth says, so that all are
backlogged from the first moment on, or comes now and then. Replicas are places that are held for a
time (loadtests/places.py). Sampled at every end of a request, between tenants that were backlogged
all the time (Sheng et al., Fairness in Serving Large Language Models, OSDI'24):

    max over tenants of served / weight - min of it <= 2 * max(w_in * L, w_out * M) / least weight

with L the longest prompt and M the tokens that all places can hold at once. Sans-IO: the
caller gives the dice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from gateway.core.dispatcher import Arrival, Dispatch, Dispatcher
from loadtests.places import Engine, Places
from shared.ids import ReplicaId, RequestId, TenantId
from shared.messages import ReplicaReport

INPUT_WEIGHT: Final = 1.0
OUTPUT_WEIGHT: Final = 2.0
RESERVE_SHARE: Final = 0.05
_FOREVER_S: Final = 1e9


@dataclass(frozen=True, kw_only=True)
class Tenant:
    name: str
    depth: int  # requests outstanding at once
    weight: float = 1.0
    every_s: float = 0.0  # mean pause before the next one; 0: at once
    prompt: tuple[int, int] = (50, 500)
    output: tuple[int, int] = (16, 256)


@dataclass
class Seen:
    """Of one tenant."""

    served: float = 0.0  # cost units
    first_tokens_s: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    tenants: dict[str, Seen]
    widest_gap: float  # of served / weight, at any sample
    bound: float
    samples: int


class Simulation:
    def __init__(
        self,
        tenants: Sequence[Tenant],
        engine: Engine,
        dice: Random,
        *,
        reserve_share: float = RESERVE_SHARE,
    ) -> None:
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._engine = engine
        self._dice = dice
        self._dispatcher = _dispatcher(sum(tenant.depth for tenant in tenants), reserve_share)
        self._events: list[tuple[float, int, str, Any]] = []
        self._count = 0
        self._asked: dict[RequestId, tuple[Tenant, int, int, float]] = {}
        self._seen = {tenant.name: Seen() for tenant in tenants}
        self._places: dict[ReplicaId, Places[RequestId]] = {}
        self._where: dict[RequestId, Places[RequestId]] = {}
        self._steady = [tenant for tenant in tenants if tenant.every_s == 0]
        for n in range(engine.replicas):
            name = ReplicaId(f"replica-{n}")
            self._places[name] = Places(engine)
            self._dispatcher.replica_added(name, 0.0)
            self._dispatcher.report(_report(name, engine.capacity), 0.0)

    def run(self, seconds: float) -> Outcome:
        for tenant in self._tenants.values():
            for _ in range(tenant.depth):
                self._ask_later(tenant, 0.0)
        self._decide(0.0)
        gap, samples = 0.0, 0
        while self._events and self._events[0][0] < seconds:
            now, _, kind, what = heapq.heappop(self._events)
            if kind == "ask":
                self._ask(what, now)
            elif kind == "first":
                self._dispatcher.answered(what, now)
                continue
            else:
                self._end(what, now)
                levels = [self._seen[one.name].served / one.weight for one in self._steady]
                gap, samples = max(gap, max(levels) - min(levels)), samples + 1
            self._decide(now)
        return Outcome(self._seen, gap, self._bound(), samples)

    def _ask_later(self, tenant: Tenant, now: float) -> None:
        """At once means before anything else is decided: such a tenant is never without a wish."""
        if tenant.every_s:
            self._push(now + self._dice.expovariate(1 / tenant.every_s), "ask", tenant)
        else:
            self._ask(tenant, now)

    def _ask(self, tenant: Tenant, now: float) -> None:
        self._count += 1
        request = RequestId(str(self._count))
        prompt, output = self._dice.randint(*tenant.prompt), self._dice.randint(*tenant.output)
        self._asked[request] = (tenant, prompt, output, now)
        # as at the door: what the reply will really have is not known
        arrival = Arrival(
            request,
            TenantId(tenant.name),
            tenant.weight,
            None,
            prompt,
            tenant.output[1],
            streams=True,
        )
        self._dispatcher.arrive(arrival, now)

    def _decide(self, now: float) -> None:
        for decision in self._dispatcher.poll(now):
            assert isinstance(decision, Dispatch), decision
            request = decision.request
            places = self._where[request] = self._places[decision.placement.replica]
            places.enter(request, self._asked[request][1])
            self._begin(places, now)

    def _begin(self, places: Places[RequestId], now: float) -> None:
        for request, first_at in places.begin(now):
            tenant, _, output, asked_at = self._asked[request]
            self._seen[tenant.name].first_tokens_s.append(first_at - asked_at)
            self._push(first_at, "first", request)
            self._push(first_at + output * self._engine.token_s, "end", request)

    def _end(self, request: RequestId, now: float) -> None:
        places = self._where.pop(request)
        places.leave(request)
        self._begin(places, now)
        tenant, prompt, output, _ = self._asked.pop(request)
        self._dispatcher.finish(request, prompt, output, now)
        self._seen[tenant.name].served += INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * output
        self._ask_later(tenant, now)

    def _push(self, at: float, kind: str, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, kind, what))

    def _bound(self) -> float:
        places = self._engine.replicas * self._engine.capacity
        prompt = max(tenant.prompt[1] for tenant in self._steady)
        held = places * max(tenant.prompt[1] + tenant.output[1] for tenant in self._steady)
        least = min(tenant.weight for tenant in self._steady)
        return 2 * max(INPUT_WEIGHT * prompt, OUTPUT_WEIGHT * held) / least


def _dispatcher(outstanding: int, reserve_share: float) -> Dispatcher:
    return Dispatcher(
        load_factor=1.25,
        load_floor=8,
        vnodes=128,
        service_s=0.5,
        host_load_s=0.005,
        disk_load_s=0.15,
        hop_s=0.002,
        per_tenant_max=outstanding,
        ttl_s=_FOREVER_S,
        input_weight=INPUT_WEIGHT,
        output_weight=OUTPUT_WEIGHT,
        warm_wait_s=0.1,
        silence_heartbeats=3,
        reserve_share=reserve_share,
        reserve_for_s=60,
    )


def _report(replica: ReplicaId, capacity: int) -> ReplicaReport:
    return ReplicaReport(
        replica=replica,
        boot="b",
        seq=1,
        base="base",
        slots=1,
        capacity=capacity,
        running=0,
        waiting=0,
        pages_total=1,
        pages_free=1,
        max_model_len=4096,
        heartbeat_s=_FOREVER_S,
    )
