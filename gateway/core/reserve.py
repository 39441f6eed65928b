"""The last places of a replica, kept for tenants that hold little: trunk reservation.

Where every place is taken as soon as it is free, whoever comes next in turn still waits for one to
come free: with C places held for S each, S / C on average and some 5 S / C at the 99th percentile.
So while several tenants ask, a replica's places are not all for everyone:

    r      = ceil(share * capacity)         none where capacity < 8: an eighth is the most it costs
    common = capacity - r                   places that anyone may have (gateway/core/replica.py)

    beyond `common` only a tenant with    running / weight <= half of sum(running) / sum(weight)
    or, while few wait, with              running <= a third of sum(running)

`running` is the estimated cost of what it has in flight here and at other gateways, the sums are
over all that have any: less than half of its weighted share, and so always one that has nothing.
Few wait while the line is no longer than a quarter of what runs: a fleet that is full at times, of
many tenants, and not flooded. To keep places back would then only make it smaller, for whoever is
next in turn need not wait long; but what would fill it first is one tenant's, or two tenants',
flood, before its line has grown, and they hold more than a third.

- The order is the fair queue's. A claim to a last place is the start tag, and while a head waits
  for a common place of a replica, only stronger claims reach into its reserve: nobody passes one
  who came before. So every law of the order holds as without. To those who hold much it is a queue
  of less depth, and a smaller depth is a tighter bound (SFQ(D): Jin, Chase & Kaur, Interposed
  proportional sharing for a storage service utility, 2004).
- What it costs is r of C places, while those who hold little do not ask; nothing once one tenant
  alone has asked for `for_s`. Requests that ran in the reserve count as any: the next places that
  come free fill it again.
- Its use is a birth-death process: with requests of those who hold little at a rate of a, and all
  ends at a rate of e, one of them finds it empty with a probability of about (a / e) ** r. So few
  places do, however many there are (Kelly, Loss networks, 1991).
- A place is not a slot: who comes with an adapter that is not in one waits for that, as anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from shared.ids import TenantId

FIRST: Final = -math.inf
NONE: Final = math.inf
"""Claims: of one whom nothing is kept from, and of one who has to wait for a place of anyone's."""

_LEAST_CAPACITY: Final = 8
_MODEST: Final = 0.5
_A_THIRD: Final = 1 / 3
_FEW: Final = 0.25


def reserved(share: float, capacity: int) -> int:
    """r, of a replica's places."""
    return math.ceil(share * capacity - 1e-9) if capacity >= _LEAST_CAPACITY else 0


@dataclass(slots=True)
class _Holding:
    """What one tenant has in flight, in cost units."""

    weight: float
    requests: int = 0
    here: float = 0.0
    elsewhere: float = 0.0

    @property
    def running(self) -> float:
        return self.here + self.elsewhere


class Reserve:
    def __init__(self, *, for_s: float) -> None:
        """`for_s` 0: nothing is kept."""
        self._for_s = for_s
        self._holdings: dict[TenantId, _Holding] = {}
        self._running = self._weights = 0.0  # sums over the holdings
        self._requests = 0  # in flight here
        self._crowded_out = False  # somebody had no claim since too many waited
        self._last: TenantId | None = None  # who asked
        self._others_elsewhere = False  # asked at another gateway since
        self.due = math.inf
        """Until then it is kept, unless another tenant asks meanwhile; infinite: it is not."""

    def asked(self, tenant: TenantId, now: float) -> None:
        """It has a request; the second time at one moment changes nothing."""
        if self._for_s and (tenant != self._last or self._others_elsewhere):
            if self._last is not None or self._others_elsewhere:
                self.due = now + self._for_s
            self._last, self._others_elsewhere = tenant, False

    def claim(self, tenant: TenantId, tag: float, now: float, *, waiting: int) -> float:
        """To a replica's last places, while so many wait; less is stronger."""
        if self.due == math.inf or now >= self.due:
            return FIRST
        mine = self._holdings.get(tenant)
        if mine is None:
            return tag
        if mine.running <= _MODEST * self._running * mine.weight / self._weights:
            return tag
        if mine.running <= _A_THIRD * self._running:
            if self._few(waiting):
                return tag
            self._crowded_out = True
        return NONE

    def opens(self, now: float, *, waiting: int) -> bool:
        """From now on it is open to all, or, since few wait again, to more."""
        return now >= self.due or (self._crowded_out and self._few(waiting))

    def opened(self, now: float, *, waiting: int) -> bool:
        """True once when it `opens`."""
        opens = self.opens(now, waiting=waiting)
        if opens:
            self._crowded_out = False
        if now >= self.due:
            self.due = math.inf
        return opens

    def _few(self, waiting: int) -> bool:
        return waiting <= _FEW * self._requests

    # -- what runs

    def began(self, tenant: TenantId, weight: float, cost: float) -> None:
        mine = self._holdings.get(tenant)
        if mine is None:
            mine = self._holdings[tenant] = _Holding(0.0)
        self._weights += weight - mine.weight
        self._running += cost
        mine.weight = weight
        mine.here += cost
        mine.requests += 1
        self._requests += 1

    def ended(self, tenant: TenantId, cost: float) -> None:
        """`cost` as it began."""
        mine = self._holdings[tenant]
        mine.requests -= 1
        self._requests -= 1
        self._running -= cost
        mine.here = mine.here - cost if mine.requests else 0.0
        self._forget_if_idle(tenant, mine)

    def elsewhere(self, tenant: TenantId, running: float) -> None:
        """What it has in flight at other gateways. Who has nothing here counts with a weight of 1:
        others say what is served, not to whom it is promised."""
        self._others_elsewhere |= tenant != self._last
        mine = self._holdings.get(tenant)
        if mine is None:
            if not running:
                return
            mine = self._holdings[tenant] = _Holding(1.0)
            self._weights += 1.0
        self._running += running - mine.elsewhere
        mine.elsewhere = running
        self._forget_if_idle(tenant, mine)

    def _forget_if_idle(self, tenant: TenantId, mine: _Holding) -> None:
        if not mine.requests and not mine.elsewhere:
            self._weights -= mine.weight
            del self._holdings[tenant]
            if not self._holdings:
                self._running = self._weights = 0.0

    def check(self) -> None:
        holdings = self._holdings.values()
        assert all(mine.requests or mine.elsewhere for mine in holdings)
        assert self._requests == sum(mine.requests for mine in holdings)
        running, weights = sum(m.running for m in holdings), sum(m.weight for m in holdings)
        assert math.isclose(self._running, running, rel_tol=1e-6, abs_tol=1e-3)
        assert math.isclose(self._weights, weights, rel_tol=1e-6, abs_tol=1e-6)
