"""Whose turn is it: start-time fair queueing over tenants, charged by estimate and then corrected.

Every tenant has a level, the service it really had so far, and `unsettled`, the charges of its
requests in flight, both in virtual units (cost / weight). Its start tag is their sum, and the
tenant with the least tag is next:

    tag = level + unsettled      pop:     unsettled += estimate / weight
                                 settle:  unsettled -= estimate / weight; level += actual / weight

So for two tenants that both have something to pop, the tags stay within one largest item of each
other, plus the corrections in flight (Goyal, Vin & Cheng, Start-time Fair Queueing, 1996; with the
cost of Sheng et al., Fairness in Serving Large Language Models, 2024). The present is the highest
level at which a tenant was served. A tenant that returns from idleness is lifted to it: idleness
banks nothing, and an idle tenant at or below the present need not even be remembered. The lift
compares levels, not tags: a tag is swollen by estimates that later shrink. What a tenant had at
other gateways counts as had here (gateway/core/service.py): service lifts its level, to `lag_max`
above the present at most, and what runs there its tag.

A tenant's requests stand in lines, one per placement key (the adapter, and what must be avoided),
each first in first out. Among its lines a tenant offers the one whose head came first. A line whose
head cannot be placed now is parked by the caller: it keeps its place in the tenant's order and the
tenant keeps its tag, while the other lines and tenants go on (delay scheduling). A tenant all of
whose lines are parked falls behind the present and is owed the difference, up to `lag_max`: more,
and one blocked for minutes would starve all others on its return. Only tenants with a line to offer
are in the order, a sorted list: a pop costs a bisection.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Generic

from gateway.core.tenant_lines import Entry, Key, Line, Tenant, jain, marked
from shared.ids import RequestId, TenantId

_LEAST_COST = 1.0  # nothing is free: at no cost a tenant would stay first for ever


class FairQueue(Generic[Key]):
    def __init__(self, *, lag_max: float) -> None:
        self._lag_max = lag_max
        self._present = 0.0
        self._tenants: dict[TenantId, Tenant[Key]] = {}
        self._order: list[tuple[float, int, TenantId]] = []  # (tag, stamp, tenant)
        self._queued: dict[RequestId, Entry[Key]] = {}
        self._in_flight: dict[RequestId, Entry[Key]] = {}
        self._by_key: dict[Key, dict[TenantId, Line[Key]]] = {}
        self._stamp = 0  # of ranks: equal tags go in the order in which they were ranked
        self._places = 0
        self._sweep_at = 64
        self._served: dict[TenantId, float] = {}  # cost units settled since `take_served`

    @property
    def gap(self) -> float:
        """Virtual service between the least and the most served of those whose turn it may be."""
        return self._order[-1][0] - self._order[0][0] if self._order else 0.0

    @property
    def turn(self) -> float:
        """The tag of `first`."""
        return self._order[0][0] if self._order else float("-inf")

    def fairness(self) -> float:
        """Jain's index of what those had who waited ever since this was last asked, per weight."""
        return jain(marked(self._tenants.values()))

    # -- in and out

    def push(
        self,
        request: RequestId,
        *,
        tenant: TenantId,
        weight: float,
        key: Key,
        cost: float,
        waiting_max: int,
    ) -> bool:
        """To the end of its line, or False: this tenant has `waiting_max` in its lines already.

        `cost` is the estimate that a pop will charge.
        """
        assert request not in self._queued, f"{request} is queued already"
        mine = self._tenants.get(tenant)
        if (mine.waiting if mine is not None else 0) >= waiting_max:
            return False
        mine, entry = self._admit(request, tenant, weight, key, cost)
        self._enqueue(mine, entry)
        return True

    def pass_through(
        self, request: RequestId, *, tenant: TenantId, weight: float, key: Key, cost: float
    ) -> None:
        """`push` and `pop` in one, of a request that finds the queue empty."""
        assert not self._queued, "somebody waits, and may come first"
        mine, entry = self._admit(request, tenant, weight, key, cost)
        mine.level = max(mine.level, self._present)
        self._charge_estimate(mine, entry)

    def first(self) -> RequestId | None:
        """The head whose turn it is; `pop`, `park` or `remove` it to see the next."""
        if not self._order:
            return None
        mine = self._tenants[self._order[0][2]]
        return next(iter(mine.lines[mine.ready[0][1]].entries))

    def pop(self, request: RequestId) -> None:
        """Take the head that `first` showed out of the queue and charge it to its tenant."""
        entry = self._queued[request]
        mine = self._tenants[entry.tenant]
        self._dequeue(mine, entry)
        self._charge_estimate(mine, entry)
        self._rank(mine)

    def settle(self, request: RequestId, actual: float) -> None:
        """A popped request ended and really cost this much: the correction."""
        self._charge(self._in_flight.pop(request), actual)

    def requeue(self, request: RequestId, key: Key) -> None:
        """A popped request comes back, uncharged, before all of its tenant that came after it."""
        entry = self._in_flight.pop(request)
        self._charge(entry, 0.0)
        mine = self._tenants.setdefault(
            entry.tenant, Tenant(entry.tenant, entry.weight, self._present)
        )
        entry.key, entry.charge = key, 0.0
        self._enqueue(mine, entry)

    def remove(self, request: RequestId) -> None:
        """Out of the queue, uncharged."""
        entry = self._queued[request]
        mine = self._tenants[entry.tenant]
        self._dequeue(mine, entry)
        self._rank(mine)
        self._forget_if_idle(mine)

    # -- parking

    def park(self, tenant: TenantId, key: Key) -> None:
        """The line's head cannot be placed now: pass it over until `unpark`."""
        mine = self._tenants[tenant]
        mine.lines[key].parked = True
        self._offer(mine, mine.lines[key])
        self._rank(mine)

    def unpark(self, key: Key) -> None:
        """Offer the lines of this key again, every tenant's, each at its old place."""
        for tenant, line in self._by_key.get(key, {}).items():
            if line.parked:
                line.parked = False
                self._offer(self._tenants[tenant], line)
                self._rank(self._tenants[tenant])

    # -- several gateways

    def take_served(self) -> dict[TenantId, float]:
        """Cost units that were settled for each tenant since this was last asked."""
        served, self._served = self._served, {}
        return served

    def running(self) -> dict[TenantId, float]:
        """Estimated cost units of each tenant that are in flight."""
        return {t.id: t.unsettled * t.weight for t in self._tenants.values() if t.in_flight}

    def served_elsewhere(self, tenant: TenantId, served: float, running: float) -> None:
        """It had so many cost units more at other gateways, and has `running` in flight there."""
        if (mine := self._tenants.get(tenant)) is not None:  # who is idle here is not compared
            lifted = min(mine.level + served / mine.weight, self._present + self._lag_max)
            mine.level = max(mine.level, lifted)
            mine.elsewhere = running / mine.weight
            self._rank(mine)

    # -- questions

    def __len__(self) -> int:
        return len(self._queued)

    def waiting(self, tenant: TenantId) -> int:
        return mine.waiting if (mine := self._tenants.get(tenant)) is not None else 0

    def all_keys(self) -> tuple[Key, ...]:
        """Of all lines that have somebody in them."""
        return tuple(self._by_key)

    def of_key(self, key: Key) -> list[RequestId]:
        """Everybody in the lines of this key, in order of arrival."""
        entries = [e for line in self._by_key.get(key, {}).values() for e in line.entries.values()]
        return [entry.request for entry in sorted(entries, key=lambda entry: entry.place)]

    # -- inside

    def _admit(
        self, request: RequestId, tenant: TenantId, weight: float, key: Key, cost: float
    ) -> tuple[Tenant[Key], Entry[Key]]:
        assert request not in self._in_flight, f"{request} is in flight already"
        if not weight > 0:
            raise ValueError(f"a weight is above zero, not {weight}: {tenant}")
        mine = self._tenants.get(tenant)
        if mine is None:
            self._sweep()
            mine = self._tenants[tenant] = Tenant(tenant, weight, self._present)
        mine.weight = weight
        self._places += 1
        return mine, Entry(request, tenant, key, max(cost, _LEAST_COST), self._places)

    def _charge_estimate(self, mine: Tenant[Key], entry: Entry[Key]) -> None:
        self._present = max(self._present, mine.level)
        entry.weight, entry.charge = mine.weight, entry.cost / mine.weight
        mine.unsettled += entry.charge
        mine.in_flight += 1
        self._in_flight[entry.request] = entry

    def _enqueue(self, mine: Tenant[Key], entry: Entry[Key]) -> None:
        if not mine.waiting:
            mine.level = max(mine.level, self._present)
        mine.waiting += 1
        self._queued[entry.request] = entry
        line = mine.lines.get(entry.key)
        if line is None:
            line = mine.lines[entry.key] = Line(entry.key)
            self._by_key.setdefault(entry.key, {})[mine.id] = line
        last = next(reversed(line.entries.values()), None)
        line.entries[entry.request] = entry
        if last is not None and last.place > entry.place:
            line.entries = OrderedDict(sorted(line.entries.items(), key=lambda kv: kv[1].place))
        self._offer(mine, line)
        self._rank(mine)

    def _dequeue(self, mine: Tenant[Key], entry: Entry[Key]) -> None:
        line = mine.lines[entry.key]
        del line.entries[entry.request]
        del self._queued[entry.request]
        mine.waiting -= 1
        mine.marked = mine.marked if mine.waiting else None
        self._offer(mine, line)
        if not line.entries:
            del mine.lines[entry.key]
            del self._by_key[entry.key][mine.id]
            if not self._by_key[entry.key]:
                del self._by_key[entry.key]

    def _charge(self, entry: Entry[Key], actual: float) -> None:
        mine = self._tenants[entry.tenant]
        mine.in_flight -= 1
        mine.unsettled = mine.unsettled - entry.charge if mine.in_flight else 0.0
        mine.level += actual / entry.weight
        self._served[mine.id] = self._served.get(mine.id, 0.0) + actual
        self._rank(mine)
        self._forget_if_idle(mine)

    def _offer(self, mine: Tenant[Key], line: Line[Key]) -> None:
        """Put the line where its head belongs among the tenant's ready lines, or nowhere."""
        head = next(iter(line.entries.values()), None)
        place = None if head is None or line.parked else head.place
        if place == line.offered:
            return
        if line.offered is not None:
            del mine.ready[bisect_left(mine.ready, (line.offered,))]
        if place is not None:
            insort(mine.ready, (place, line.key), key=lambda ready: ready[0])
        line.offered = place

    def _rank(self, mine: Tenant[Key]) -> None:
        """Put the tenant where its tag belongs in the order, or nowhere when it offers nothing."""
        if mine.ranked is not None:
            if mine.ready and mine.ranked[0] == mine.tag:
                return
            del self._order[bisect_left(self._order, mine.ranked)]
            mine.ranked = None
        elif mine.ready:
            mine.level = max(mine.level, self._present - self._lag_max - mine.unsettled)
        if mine.ready:
            self._stamp += 1
            mine.ranked = (mine.tag, self._stamp)
            insort(self._order, (*mine.ranked, mine.id))

    def _forget_if_idle(self, mine: Tenant[Key]) -> None:
        if not self._queued and not self._in_flight:
            self._tenants.clear()  # nobody is here to be compared with: all start anew
        elif not mine.waiting and not mine.in_flight and mine.level <= self._present:
            del self._tenants[mine.id]

    def _sweep(self) -> None:
        """Forget idle tenants that the present has overtaken; amortised one look per new tenant."""
        if len(self._tenants) >= self._sweep_at:
            for mine in list(self._tenants.values()):
                self._forget_if_idle(mine)
            self._sweep_at = max(64, 2 * len(self._tenants))

    def check(self) -> None:
        assert not self._queued.keys() & self._in_flight.keys()
        assert self._order == sorted(self._order)
        assert sum(mine.waiting for mine in self._tenants.values()) == len(self._queued)
        assert sum(mine.in_flight for mine in self._tenants.values()) == len(self._in_flight)
        ranked = {tenant: (tag, stamp) for tag, stamp, tenant in self._order}
        assert len(ranked) == len(self._order), "a tenant stands in the order twice"
        for mine in self._tenants.values():
            mine.check(ranked.get(mine.id))
            assert all(self._by_key[key][mine.id] is line for key, line in mine.lines.items())
