"""One simulated replica: the production AdapterCache, with a price list in place of an engine.

What it keeps of the real one: which adapter gets a slot when, what a load costs by the tier it
comes from, who waits for whom (a request waits for its own adapter and for a place, the base for a
place only), and the reports. What it leaves out: batches do not slow each other, loads do not
share a disk, and pages never run out. So waits for adapters and places are right, and absolute
token times are as good as the price list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from replica.core.adapter_cache import AdapterCache, Load
from replica.core.pages import PagePool
from shared.ids import AdapterId, ReplicaId, RequestId
from shared.messages import ReplicaReport, Tier

DIGEST = "0" * 64
BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What things cost, in seconds, and how much of each a replica has."""

    slots: int = 16
    host_max: int = 128
    capacity: int = 32  # sequences that run at once
    disk_load_s: float = 0.15  # disk to host memory
    host_load_s: float = 0.004  # host memory to a slot
    prefill_s: float = 0.02  # of any request
    prompt_token_s: float = 0.0  # and a token more
    output_token_s: float = 0.02
    report_interval_s: float = 0.05
    heartbeat_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the replica sees it."""

    request: RequestId
    adapter: AdapterId | None
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Read:
    """An adapter reaches host memory."""

    load: Load


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter reaches its slot."""

    load: Load


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's last token. `tier` is where its adapter was when it came; None for the base."""

    job: Job
    tier: Tier | None
    first_token_at: float


@dataclass(frozen=True, slots=True)
class ReportDue:
    pass


Event = Read | Loaded | Ended | ReportDue
"""What the replica asks to be told later, as (time, event)."""


class SimReplica:
    def __init__(self, *, name: ReplicaId, prices: Prices, adapters: Sequence[AdapterId]) -> None:
        self.name = name
        self.loads: dict[Tier, int] = {Tier.HOST: 0, Tier.DISK: 0}
        self.served = 0
        self._prices = prices
        self._cache = AdapterCache(
            slots=prices.slots, host_max=prices.host_max, pool=PagePool(pages=1, page_tokens=1)
        )
        for adapter in adapters:
            self._cache.offer(adapter, DIGEST, 16, 1, pages=0)
        self._waiting: dict[RequestId, Job] = {}  # in order of arrival
        self._running: set[RequestId] = set()
        self._tiers: dict[RequestId, Tier] = {}
        self._loading: dict[AdapterId, Tier] = {}
        self._seq = 0
        self._reported_at = float("-inf")
        self._report_due_at: float | None = None

    @property
    def in_flight(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, job: Job, now: float) -> list[tuple[float, Event]]:
        self._waiting[job.request] = job
        if job.adapter is not None:
            if self._cache.slot_of(job.adapter) is not None:
                self._tiers[job.request] = Tier.GPU
            elif job.adapter in self._loading:
                self._tiers[job.request] = self._loading[job.adapter]
            self._cache.want(job.adapter, str(job.request), now)
        return self._go_on(now)

    def handle(self, event: Read | Loaded | Ended, now: float) -> list[tuple[float, Event]]:
        match event:
            case Read(load):
                self._cache.read(load.adapter, load.digest)
            case Loaded(load):
                del self._loading[load.adapter]
                self._cache.loaded(load.adapter, load.digest, load.slot)
            case Ended(job):
                self._running.remove(job.request)
                self._cache.release(str(job.request))
                self.served += 1
        return self._go_on(now)

    def start(self, now: float) -> list[tuple[float, Event]]:
        """The first report: until it is heard, nothing is sent here."""
        return self._report_by(now)

    def report(self, now: float) -> tuple[ReplicaReport | None, list[tuple[float, Event]]]:
        """A snapshot, and the heartbeat after it; None when an earlier report took its place."""
        if self._report_due_at != now:
            return None, []
        self._seq += 1
        self._reported_at, self._report_due_at = now, None
        prices = self._prices
        snapshot = ReplicaReport(
            replica=self.name,
            boot="1",
            seq=self._seq,
            base=BASE,
            slots=prices.slots,
            capacity=prices.capacity,
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=1,
            pages_free=1,
            max_model_len=1 << 20,
            heartbeat_s=prices.heartbeat_s,
            adapters=self._cache.states(),
        )
        return snapshot, self._report_by(now + prices.heartbeat_s)

    def check(self) -> None:
        self._cache.check()
        assert len(self._running) <= self._prices.capacity, "more sequences than places"

    def _go_on(self, now: float) -> list[tuple[float, Event]]:
        """Start what can start, begin the loads that are wanted, and say so."""
        coming = self._start(now) + self._load(now)
        return coming + self._report_by(
            max(now, self._reported_at + self._prices.report_interval_s)
        )

    def _start(self, now: float) -> list[tuple[float, Event]]:
        coming: list[tuple[float, Event]] = []
        prices = self._prices
        for job in list(self._waiting.values()):
            if len(self._running) == prices.capacity:
                break
            if job.adapter is not None:
                if self._cache.slot_of(job.adapter) is None:
                    continue  # others pass it
                self._cache.acquire(job.adapter, str(job.request), now)
            del self._waiting[job.request]
            self._running.add(job.request)
            first_at = now + prices.prefill_s + prices.prompt_token_s * job.prompt_tokens
            ends_at = first_at + prices.output_token_s * (job.output_tokens - 1)
            coming.append((ends_at, Ended(job, self._tiers.pop(job.request, None), first_at)))
        return coming

    def _load(self, now: float) -> list[tuple[float, Event]]:
        coming: list[tuple[float, Event]] = []
        for command in self._cache.poll(now):
            if not isinstance(command, Load):
                continue  # an eviction takes no time
            self.loads[command.tier] += 1
            self._loading[command.adapter] = command.tier
            in_host_at = now
            if command.tier is Tier.DISK:
                in_host_at += self._prices.disk_load_s
                coming.append((in_host_at, Read(command)))
            coming.append((in_host_at + self._prices.host_load_s, Loaded(command)))
            for job in self._waiting.values():
                if job.adapter == command.adapter:
                    self._tiers.setdefault(job.request, command.tier)
        return coming

    def _report_by(self, at: float) -> list[tuple[float, Event]]:
        """Ask for a report at `at`, unless an earlier one is coming."""
        if self._report_due_at is not None and self._report_due_at <= at:
            return []
        self._report_due_at = at
        return [(at, ReportDue())]
