"""One record a finished request, entered in the store exactly once.

`record` and `spill` write lines to a spool on disk, one write for what a turn of the event loop has
finished; the last bytes of a reply go out after that, so a gateway that is killed loses no record
of a request whose client has seen the end. A task
takes the lines in order and enters them in batches; one script appends a batch to a stream and adds
to the sums of its hour, or does nothing if a request's id is known. So a batch whose fate is
unknown is simply tried again, and so is what another gateway left behind when it was killed.
Laws: sums = records, each once, whatever fails in which order; nothing here delays a request.

While the store is away the spool grows on disk, to a bound, and is fsynced. A disk that refuses
leaves a short queue in memory; what neither takes is counted in `lost` and logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.state.records import HOUR_S as HOUR_S
from gateway.state.records import HOURS_MAX as HOURS_MAX
from gateway.state.records import OUTCOMES as OUTCOMES
from gateway.state.records import STREAM, Entry, boot_key, entry_of, hour_key, script_call
from gateway.state.records import Outcome as Outcome
from gateway.state.records import Record as Record
from gateway.store.redis import Store, StoreAway
from gateway.store.spool import Spool
from shared import tasks
from shared.clock import Clock, monotonic, wall

_log = logging.getLogger(__name__)

DIMENSIONS: Final = ("tenant", "adapter", "version", "replica", "hour")
"""What usage can be split by; `version` is the head of the adapter's digest."""

_NANO: Final = 10**9
_COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "estimated")
_BATCH: Final = 256
_GATHER_S: Final = 0.2
_RETRY_S: Final = 0.5
_FRESH_MAX: Final = 256
_MEMORY_MAX: Final = 10_000
_CLOSE_S: Final = 2.0
_HOURS_A_READ: Final = 24


class BadQuestion(ValueError):
    """A usage question that cannot be answered; `param` names what is wrong with it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class Ledger:
    def __init__(
        self, store: Store, spool: Path, clock: Clock = wall, now: Clock = monotonic
    ) -> None:
        """`clock` is for what the records say, `now` for how long they wait."""
        self._store = store
        self._path = spool
        self._clock = clock
        self._now = now
        self._behind_since = 0.0  # records that are not in the store came after this
        self._spools: list[Spool] = []  # our own first, then what others left behind
        self._fresh: list[bytes] = []  # of this turn of the loop
        self._memory: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._entering = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._refused = False
        self.lost = 0

    @property
    def backlog_bytes(self) -> int:
        """Records that are not in the store yet."""
        waiting = sum(spool.waiting_bytes for spool in self._spools)
        return waiting + sum(map(len, self._memory)) + sum(map(len, self._fresh))

    @property
    def lag_s(self) -> float:
        """How long the oldest of them has waited, at most."""
        return self._now() - self._behind_since if self.backlog_bytes else 0.0

    @property
    def degraded(self) -> bool:
        """Records wait on disk, because the store did not take them."""
        return self._refused and self.backlog_bytes > 0

    async def start(self) -> None:
        """Take up the spool, with what an earlier life left in it."""
        try:
            own = Spool.first_free(self._path)
            self._spools = [own, *Spool.orphans(self._path)]
        except OSError as error:
            reason = f"{self._path}: {error}"
            _log.error("no ledger spool; a killed gateway loses records", extra={"reason": reason})
        self._behind_since = self._now()
        if self.backlog_bytes:
            self._wake.set()
        self._task = tasks.spawn(self._run(), name="ledger")

    async def close(self) -> None:
        """Enter what is there; what the store does not take in time stays in the spool."""
        if self._task is not None:
            await tasks.stop(self._task)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._enter_all()
        except (StoreAway, OSError):  # TimeoutError is one
            _log.warning("ledger closed with a backlog", extra={"bytes": self.backlog_bytes})
        self._lose(len(self._memory))
        for spool in self._spools:
            spool.sync()
            spool.close()
        self._spools = []

    def record(self, record: Record) -> None:
        """It is on disk after the next `spill`, at the latest when this turn of the loop ends."""
        if not self._fresh:
            if not self.backlog_bytes:
                self._behind_since = self._now()
            asyncio.get_running_loop().call_soon(self.spill)
        self._fresh.append(orjson.dumps(record))
        if len(self._fresh) >= _FRESH_MAX:
            self.spill()

    def spill(self) -> None:
        """What was just recorded goes to the spool, or to memory while the disk refuses."""
        lines, self._fresh = self._fresh, []
        if not lines:
            return
        self._wake.set()
        try:
            self._spools[0].append(*lines)
        except (OSError, IndexError):  # IndexError: there is no spool
            room = max(0, _MEMORY_MAX - len(self._memory))
            self._memory.extend(lines[:room])
            self._lose(len(lines[room:]))

    async def usage(
        self, start: float, end: float, by: tuple[str, ...] = ("tenant",)
    ) -> list[dict[str, Any]]:
        """Sums over the hours that [start, end) touches, a row for each value of `by`, ordered.

        A row has the columns of `by`, then requests, prompt_tokens, cached_tokens,
        completion_tokens, estimated, one count for each outcome, and `spend`, in units of money.
        Raises BadQuestion, StoreAway.
        """
        for name in by:
            if name not in DIMENSIONS:
                raise BadQuestion("by", f"{name!r} is not one of {', '.join(DIMENSIONS)}")
        hours = self._hours(start, end)
        await self._caught_up()
        sums: dict[tuple[str, ...], dict[str, int]] = {}
        for at in range(0, len(hours), _HOURS_A_READ):
            chunk = hours[at : at + _HOURS_A_READ]
            found = await self._store.hashes([hour_key(hour) for hour in chunk])
            for hour, fields in zip(chunk, found, strict=True):
                _add(sums, by, hour, fields)
        return [
            {**dict(zip(by, key, strict=True)), **_row(counts)}
            for key, counts in sorted(sums.items())
        ]

    async def records(
        self, start: float, end: float, *, after: str = "", most: int = 1000
    ) -> tuple[list[dict[str, Any]], str]:
        """Records that finished in [start, end), of the next `most` after the id `after`, each with
        its `id`; and the id to go on after, or "" when there are no more."""
        if not after:
            await self._caught_up()
        entries = await self._store.entries(STREAM, after=after, most=most)
        rows = []
        for entry_id, fields in entries:
            record = orjson.loads(fields["record"])
            if start <= record["at"] < end:
                record["spend"] = record.get("spend", 0) / _NANO
                rows.append({"id": entry_id, **record})
        return rows, entries[-1][0] if len(entries) == most else ""

    async def trim(self, through: str) -> int:
        """Forget records up to the id `through`, which are elsewhere now; how many. The sums of
        their hours stay."""
        return await self._store.trim(STREAM, through)

    async def billed(self, replica: str, boot: str) -> dict[str, int]:
        """Of one life of a replica: counted_requests, counted_tokens (completion tokens, as the
        replica told), estimated_requests, estimated_tokens (as we counted when it could not)."""
        await self._caught_up()
        [found] = await self._store.hashes([boot_key(replica, boot)])
        names = ("counted_requests", "counted_tokens", "estimated_requests", "estimated_tokens")
        return {name: int(found.get(name, 0)) for name in names}

    async def _caught_up(self) -> None:
        """So that a request just finished is in; else the answer lags, and says nothing false."""
        with suppress(StoreAway, OSError):  # TimeoutError is one
            async with asyncio.timeout(_RETRY_S):
                await self._enter_all()

    def _hours(self, start: float, end: float) -> list[int]:
        end = min(end, self._clock() + HOUR_S)  # hours that have not begun hold nothing
        first, last = int(start // HOUR_S), int(-(-end // HOUR_S))
        if last - first > HOURS_MAX:
            raise BadQuestion("from", f"at most {HOURS_MAX} hours may lie between from and to")
        return list(range(first, last))

    # from the spool to the store

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            self._wake.clear()
            try:
                await self._enter_all()
                self._refused = False
            except (StoreAway, OSError) as error:
                if not self._refused:
                    _log.warning("ledger waits for the store", extra={"reason": str(error)})
                self._refused = True
                self._wake.set()
                await self._keep_safe()
                await asyncio.sleep(_RETRY_S)
                await self._store.back()

    async def _keep_safe(self) -> None:
        """What waits shall survive a power cut too; the disk may take its time."""
        try:
            for spool in self._spools:
                await asyncio.to_thread(spool.sync)
        except OSError as error:
            _log.error("ledger spool not synced", extra={"reason": str(error)})

    async def _enter_all(self) -> None:
        self.spill()
        begun_at = self._now()
        async with self._entering:
            while lines := [self._memory[n] for n in range(min(_BATCH, len(self._memory)))]:
                await self._enter(lines)
                for _ in lines:
                    self._memory.popleft()
            for spool in list(self._spools):
                while lines := spool.peek(_BATCH):
                    await self._enter(lines)
                    spool.commit(lines)
            for spool in self._spools[1:]:
                spool.close()
            del self._spools[1:]
        self._behind_since = max(self._behind_since, begun_at)

    async def _enter(self, lines: Iterable[bytes]) -> None:
        """All of them, or StoreAway: then the whole batch is tried again."""
        hours: dict[int, dict[str, Entry]] = {}
        for line in lines:
            try:
                entry = entry_of(line)
            except (TypeError, ValueError, KeyError) as error:
                self._lose(1, reason=repr(error))
            else:
                hours.setdefault(entry.hour, {}).setdefault(entry.request, entry)
        for entries in hours.values():
            batch = list(entries.values())
            entered = await self._store.script("record", *script_call(batch))
            if not entered and len(batch) > 1:  # one of them is known: which?
                await self._store.scripts("record", [script_call([one]) for one in batch])

    def _lose(self, records: int, *, reason: str = "neither store nor disk takes them") -> None:
        if records:
            self.lost += records
            _log.error("ledger records lost", extra={"records": records, "reason": reason})


def _add(
    sums: dict[tuple[str, ...], dict[str, int]],
    by: tuple[str, ...],
    hour: int,
    fields: dict[str, str],
) -> None:
    begins = datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%dT%H:00Z")
    for field, count in fields.items():
        name, _, who = field.partition(" ")
        values = dict(zip(DIMENSIONS, [*orjson.loads(who), begins], strict=True))
        counts = sums.setdefault(tuple(values[column] for column in by), {})
        counts[name] = counts.get(name, 0) + int(count)


def _row(counts: dict[str, int]) -> dict[str, float]:
    row: dict[str, float] = {name: counts.get(name, 0) for name in (*_COUNTS, *OUTCOMES)}
    return row | {"spend": counts.get("spend", 0) / _NANO}
