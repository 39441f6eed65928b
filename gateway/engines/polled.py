"""A server of another make as a replica: looked at every second, and what it tells made a report.

Its first page is its heartbeat: no answer, or one that cannot be used, and it is lost until the
next. Where its adapters are is inferred (gateway/core/inferred.py) and marked so, but for those
that it says run now. An adapter of the registry that it was refused is reported FAILED, with its
words; a new version that was refused while the old one is there, the admin API shows beside it
(gateway/admin/adapters.py). A process that began anew, or was away, is a new life: cold, with its
slow start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from secrets import token_hex
from typing import Final, NamedTuple, Protocol

from gateway.config import ReplicaEntry
from gateway.core.inferred import Inferred
from gateway.edge.exchange import ConnectFailed, ReplyTimeout, ReplyUnfit, UpstreamError
from gateway.edge.upstream import Upstream
from gateway.engines.asking import asked
from gateway.engines.engine import Answer, Call, Engine, Told, name_here, name_there
from gateway.fleet.pump import Pump
from gateway.state.adapter_records import AdapterRecord
from shared.ids import AdapterId, ReplicaId
from shared.messages import AdapterState, ReplicaReport

_log = logging.getLogger(__name__)

POLL_S: Final = 1.0
LOAD_S: Final = 300.0
"""A load may fetch its adapter from afar first."""


class Records(Protocol):
    """Of the registry, what is asked here."""

    def adapter(self, name: str) -> AdapterRecord | None: ...

    def desired(self) -> Iterable[AdapterRecord]: ...


class Version(NamedTuple):
    adapter: AdapterId
    digest: str  # "": the server was given it by others, and nobody said which it is
    path: str


class Polled:
    """`run` until cancelled. It is the server's Dialect too."""

    def __init__(
        self,
        entry: ReplicaEntry,
        engine: Engine,
        upstream: Upstream,
        pump: Pump,
        records: Records,
        *,
        silence_heartbeats: float,
        takes: Callable[[], Callable[[str], bool]] = lambda: lambda adapter: True,
        poll_s: float = POLL_S,
    ) -> None:
        """`takes`: says now whether an adapter of the registry belongs there."""
        self.replica: Final = ReplicaId(entry.id)
        self.engine: Final = engine
        self.lines: Final = f"authorization: Bearer {entry.api_key}\r\n" if entry.api_key else ""
        self.held: frozenset[str] | None = None
        """What it listed at the last look, in its own names; None while it is lost."""
        self.failures: dict[AdapterId, AdapterState] = {}
        """Versions that it was refused, and why: whoever loads them tells it here."""
        self._entry = entry
        self._upstream = upstream
        self._pump = pump
        self._records = records
        self._takes = takes
        self._poll_s = poll_s
        self._silence_s = silence_heartbeats * poll_s
        self._inferred = Inferred()
        self._base = entry.base
        self._names: dict[tuple[AdapterId, str], tuple[str, str]] = {}  # there, and their paths
        self._reported: dict[tuple[AdapterId, str], tuple[str, str]] = {}
        self._born = 0.0
        self._boot, self._seq = token_hex(8), 0

    async def run(self) -> None:
        up = False
        while True:
            try:
                report = self._report(await self._look())
            except UpstreamError as error:
                if up:
                    self._pump.replica_lost(self.replica)
                if isinstance(error, (ReplyTimeout, ConnectFailed)):
                    self._upstream.abandon(self._silence_s, "the replica fell silent")
                level = logging.WARNING if up else logging.DEBUG
                _log.log(level, "poll failed", extra={"replica": self.replica, "why": str(error)})
                up, self.held = False, None
                # what comes back may have been started anew
                self._new_life()
            else:
                self._pump.report(report)
                up = True
            await asyncio.sleep(self._poll_s)

    def completion(self, body: bytes, adapter: AdapterId | None, digest: str) -> bytes:
        if adapter is None:
            return self.engine.completion(body, self._base, None, "")
        known = self._reported.get((adapter, digest)) or self._names.get((adapter, digest))
        name, path = known or (adapter, "")
        self._inferred.used(name)
        return self.engine.completion(body, self._base, name, path)

    async def load(self, name: str, path: str) -> str:
        return await self._ask(self.engine.load(name, path))

    async def unload(self, name: str) -> str:
        return await self._ask(self.engine.unload(name))

    async def _ask(self, call: Call | None) -> str:
        if call is None:
            return "it takes no such call"
        answer = await asked(self._upstream, call.path, call.body, lines=self.lines, limit_s=LOAD_S)
        return self.engine.refusal(call, answer)

    async def _look(self) -> Told:
        """Raises UpstreamError."""
        answers: dict[str, Answer] = {}
        for page in self.engine.pages:
            answer = await asked(self._upstream, page, lines=self.lines, limit_s=self._silence_s)
            missing = answer.status in (404, 405)  # alive, but without such a page
            if answer.status != 200 and not missing:
                raise ReplyUnfit(f"the server answered {page} with status {answer.status}")
            answers[page] = Answer(answer.status, b"") if missing else answer
        return self.engine.told(answers)

    def _report(self, told: Told) -> ReplicaReport:
        """Raises ReplyUnfit when nobody names the base."""
        base = self._entry.base or told.base
        if not base:
            raise ReplyUnfit("it lists no model: name its base in fleet.replicas")
        if told.born != self._born:
            if self._born:
                self._new_life()
            self._born = told.born
        self._base = base
        self.held = frozenset(told.listed)
        versions = self._versions(told, base)
        self._inferred.keep(versions.keys())
        adapters = self._states(versions, told)
        self._seq += 1
        return ReplicaReport(
            replica=self.replica,
            boot=self._boot,
            seq=self._seq,
            base=base,
            slots=told.slots or self._entry.slots or len(adapters),
            capacity=self._entry.capacity,
            running=told.running,
            waiting=told.waiting,
            pages_total=0,
            pages_free=0,
            max_model_len=told.max_model_len,
            heartbeat_s=self._poll_s,
            adapters=adapters,
        )

    def _versions(self, told: Told, base: str) -> dict[str, Version]:
        """All it serves, by its own names. One of ours that the registry forgot is not served."""
        found: dict[str, Version] = {}
        for name in told.listed:
            adapter, short = name_here(name)
            if not short:
                found[name] = Version(AdapterId(name), "", "")
            elif (record := self._records.adapter(adapter)) and (one := record.held(short)):
                found[name] = Version(AdapterId(adapter), one.digest, one.path)
        for name in self._entry.models:
            found.setdefault(name, Version(AdapterId(name), "", ""))
        if self.engine.by_request:
            belongs = self._takes()
            for record in self._records.desired():
                now = record.held(record.current)
                if now is not None and belongs(record.name):
                    name = name_there(record.name, now.digest)
                    found[name] = Version(AdapterId(record.name), now.digest, now.path)
        found.pop(base, None)
        return found

    def _states(self, versions: dict[str, Version], told: Told) -> tuple[AdapterState, ...]:
        """One an adapter: its current version, where it has several."""
        tiers = self._inferred.tiers(
            versions,
            told.at_work,
            slots=told.slots or self._entry.slots,
            host_slots=self._entry.host_slots,
        )
        chosen: dict[AdapterId, str] = {}
        for name, one in versions.items():
            record = self._records.adapter(one.adapter)
            if one.adapter not in chosen or (record is not None and record.current == one.digest):
                chosen[one.adapter] = name
        self._names = self._reported  # a request may have been placed by the report before
        self._reported = {
            (adapter, versions[name].digest): (name, versions[name].path)
            for adapter, name in chosen.items()
        }
        states = [
            AdapterState(
                adapter,
                versions[name].digest,
                tiers[name],
                running=int(name in told.at_work),
                inferred=name not in told.at_work,
            )
            for adapter, name in chosen.items()
        ]
        failed = [state for adapter, state in self.failures.items() if adapter not in chosen]
        return (*states, *failed)

    def _new_life(self) -> None:
        self._boot, self._seq = token_hex(8), 0
        self._inferred.clear()
