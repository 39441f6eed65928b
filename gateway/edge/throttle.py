"""Addresses that send wrong keys: so many failures a minute, then nothing from there is looked at.

After that even a good key gets the same 429, so that a guesser learns nothing; except for those
who passed from that address while it was failing, since many may sit behind one proxy. (Behind one,
name the header that carries the client's address: `listen.client_ip_header`.) While no address
fails, which is always, this costs one look at an empty table.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Final

from gateway.core.bucket import Denied, TokenBucket
from shared.clock import Clock, monotonic

_ADDRESSES_MAX: Final = 10_000
_PASSED_MAX: Final = 1000
_V6_HOST_BITS: Final = 64


@dataclass(slots=True)
class _Address:
    bucket: TokenBucket
    passed: set[str] = field(default_factory=set)


class Throttle:
    def __init__(self, failures_per_min: int = 30, clock: Clock = monotonic) -> None:
        self._per_min = failures_per_min
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()  # the latest failure last

    @property
    def armed(self) -> bool:
        """Some address has failed lately; else nothing need be asked."""
        return bool(self._addresses)

    def shut(self, peer: str, who: str) -> float:
        """Seconds until this one is heard from there again; 0: now."""
        one = self._addresses.get(_network(peer)) if self._addresses else None
        if one is None or who in one.passed:
            return 0.0
        now = self._clock()
        if one.bucket.level(now) >= 1:
            return 0.0
        answer = one.bucket.take(1, now)
        return answer.retry_after_s if isinstance(answer, Denied) else 0.0

    def failed(self, peer: str) -> None:
        """A key that is nobody's came from there."""
        network, now = _network(peer), self._clock()
        one = self._addresses.pop(network, None)
        if one is None:
            burst = float(self._per_min)
            one = _Address(TokenBucket(rate_per_s=burst / 60, burst=burst, now=now))
        one.bucket.settle(1, now)
        self._addresses[network] = one
        while self._addresses:  # the first failed longest ago
            oldest = next(iter(self._addresses.values()))
            full = oldest.bucket.level(now) >= oldest.bucket.burst
            if not full and len(self._addresses) <= _ADDRESSES_MAX:
                break
            self._addresses.popitem(last=False)

    def passed(self, peer: str, who: str) -> None:
        """A good key of `who` came from there."""
        one = self._addresses.get(_network(peer)) if self._addresses else None
        if one is not None and len(one.passed) < _PASSED_MAX:
            one.passed.add(who)


def _network(peer: str) -> str:
    """One customer has a whole /64 of IPv6."""
    try:
        address = ip_address(peer)
    except ValueError:
        return peer[:64]
    if isinstance(address, IPv6Address):
        return str(int(address) >> _V6_HOST_BITS)
    return peer
