"""Replicas by DNS: the SRV records of a headless service, looked up every few seconds.

Why SRV: the ring wants stable names. An A look-up of a headless service gives addresses without
names; trying `NAME-0.SERVICE`, `NAME-1.SERVICE`, … gives names but must guess where to stop, and an
ordinal that is away is no end. `_PORT._tcp.SERVICE` gives each pod's own name and port in one
answer, for any number of StatefulSets behind one service. The price is a DNS client, since the
system's resolver cannot ask for SRV: dnspython, pure Python and without dependencies, which also
bounds each look-up (getaddrinfo holds a thread for as long as the server is silent) and asks again
by TCP when an answer is too long for a datagram.

    named    the targets that have an address: {first label: http://ADDRESS:PORT}
    nobody   NXDOMAIN, or no record: told as an empty fleet, since it is an answer
    failed   no answer in `timeout_s`, or one that says that the server failed: nothing is told,
             and what was named before stands

Addresses come with the answer, or are looked up for each target; a pod that comes back elsewhere is
followed by the census once it is silent where it was. Priority and weight are not read: the
router's terms say more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import dns.asyncresolver
import dns.exception
import dns.message
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver
import dns.rrset

from gateway.fleet_config import DiscoveryConfig, ReplicaEntry, ServiceEntry, address_of
from gateway.metrics import Metrics
from shared import tasks
from shared.ids import ReplicaId

_log = logging.getLogger(__name__)

_FAMILIES: Final = (dns.rdatatype.A, dns.rdatatype.AAAA)

Told = Callable[[Mapping[ReplicaId, ReplicaEntry]], None]


class LookupFailed(Exception):
    """No answer, or none that can be used: who is there is not known."""


class ServiceLookup:
    """One service, followed until cancelled."""

    def __init__(
        self, service: ServiceEntry, config: DiscoveryConfig, *, told: Told, metrics: Metrics
    ) -> None:
        self._service = service
        self._config = config
        self._told = told
        self._metrics = metrics
        self._resolver = _resolver(config)

    async def run(self) -> None:
        trouble = ""
        while True:
            try:
                named = await self.look_up()
            except LookupFailed as error:
                result, why = "failed", str(error)
            else:
                result, why = ("named" if named else "nobody"), ""
                self._told(named)
            self._metrics.lookups.labels(self._service.srv, result).inc()
            if why and not trouble:
                told = {"srv": self._service.srv, "why": why}
                _log.warning("look-up failed; the fleet stays as it is", extra=told)
            trouble = why
            await asyncio.sleep(self._config.interval_s)

    async def look_up(self) -> dict[ReplicaId, ReplicaEntry]:
        """Raises LookupFailed."""
        asking = tasks.spawn(self._answer(), name=f"look up {self._service.srv}")
        try:
            done, _ = await asyncio.wait({asking}, timeout=self._config.timeout_s)
        finally:
            # Not waited for: dnspython uses asyncio.wait_for, and before Python 3.12 that swallows
            # a cancellation that comes at the wrong moment. Its `lifetime` ends it all the same.
            asking.cancel()
        if not done:
            raise LookupFailed(f"no answer in {self._config.timeout_s:g} s")
        answer: dict[ReplicaId, ReplicaEntry] | LookupFailed = asking.result()
        if isinstance(answer, LookupFailed):
            raise answer
        return answer

    async def _answer(self) -> dict[ReplicaId, ReplicaEntry] | LookupFailed:
        try:
            return await self._entries()
        except (dns.exception.DNSException, OSError) as error:
            return LookupFailed(str(error) or type(error).__name__)

    async def _entries(self) -> dict[ReplicaId, ReplicaEntry]:
        answer = await self._ask(self._service.srv, dns.rdatatype.SRV)
        if answer is None or answer.rrset is None:
            return {}
        targets = sorted({(record.target, record.port) for record in answer.rrset})
        targets = targets[: self._config.members_max]
        known = _glue(answer.response)
        lacking = [target for target, _ in targets if target not in known]
        found = await asyncio.gather(*[self._address(target) for target in lacking])
        known |= {target: one for target, one in zip(lacking, found, strict=True) if one}
        kind = self._service.model_dump(exclude={"srv"})
        entries = {}
        for target, port in targets:
            if (address := known.get(target)) is not None:
                name = target.labels[0].decode("ascii", "replace")
                url = f"http://{_host(address)}:{port}"
                entries[ReplicaId(name)] = ReplicaEntry(id=name, url=url, **kind)
        return entries

    async def _address(self, target: dns.name.Name) -> str | None:
        """The least, so that it is the same each time; None: it has none now."""
        for family in _FAMILIES:
            answer = await self._ask(target, family)
            if answer is not None and answer.rrset is not None:
                return _least(answer.rrset)
        return None

    async def _ask(
        self, name: dns.name.Name | str, kind: dns.rdatatype.RdataType
    ) -> dns.resolver.Answer | None:
        """None: there is no such name."""
        try:
            return await self._resolver.resolve(
                name,
                kind,
                search=True,
                raise_on_no_answer=False,
                lifetime=self._config.timeout_s,
            )
        except dns.resolver.NXDOMAIN:
            return None


def _glue(response: dns.message.Message) -> dict[dns.name.Name, str]:
    """Addresses that came along with the answer."""
    found: dict[dns.name.Name, str] = {}
    for family in reversed(_FAMILIES):  # an A over an AAAA, as `_address` prefers
        for rrset in response.additional:
            if rrset.rdtype == family:
                found[rrset.name] = _least(rrset)
    return found


def _least(rrset: dns.rrset.RRset) -> str:
    return min(str(record.address) for record in rrset)


def _resolver(config: DiscoveryConfig) -> dns.asyncresolver.Resolver:
    resolver = dns.asyncresolver.Resolver(configure=not config.nameservers)
    if config.nameservers:
        resolver.nameservers = [
            dns.nameserver.Do53Nameserver(*address_of(text)) for text in config.nameservers
        ]
    return resolver


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
